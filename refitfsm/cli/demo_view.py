"""What the demo shows: the fleet as it is now, and a line for each cycle."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from refitfsm.cli.show import (
    Screen,
    doing,
    merged,
    milliseconds,
    phase_line,
    short_name,
    token_line,
    version_of,
)
from refitfsm.fleet import Fleet
from refitfsm.model.states import Gate, ServerState, Tag
from refitfsm.model.values import ServerView
from refitfsm.reports import CycleReport, FleetStatus

FRAME_S = 0.06
HISTORY = 12
"""Cycles that are shown: a picture must fit the terminal."""
WIDE = 100
"""Columns of a terminal from which on there is room for words."""

_STATES = {
    ServerState.OFFLINE: "red",
    ServerState.RELEASED: "yellow",
    ServerState.WEIGHTS_STAGED: "magenta",
    ServerState.KV_REBUILT: "cyan",
    ServerState.SERVING: "green",
}
_GATES = {Gate.OPEN: "green", Gate.DRAINING: "yellow", Gate.CLOSED: "dim"}
_TAGS = ((Tag.WEIGHTS, "weights", "W"), (Tag.KV_CACHE, "cache", "KV"), (Tag.CUDA_GRAPH, "graph", "G"))
_COLUMNS = ("drain", "pause", "flush", "release", "resume", "push", "verify", "continue")
_SESSION = ("begin", "push", "end")
"""Shown as one: a push with its session around it."""


class Line(NamedTuple):
    """One cycle that committed."""

    cycle: int
    version: int
    reports: tuple[CycleReport, ...]
    tokens: tuple[int, ...]
    """What every server answered to one prompt."""

    @property
    def phases_s(self) -> dict[str, float]:
        phases = merged(self.reports)
        push = sum(phases.pop(phase, 0.0) for phase in _SESSION)
        return {
            name: seconds
            for name in _COLUMNS
            if (seconds := push if name == "push" else phases.get(name, 0.0))
        }

    @property
    def seconds(self) -> float:
        return sum(report.seconds for report in self.reports)


class View:
    """Draws a fleet while it works; where nobody watches, it prints a line for each cycle."""

    def __init__(self, screen: Screen, title: str, cycles: int) -> None:
        self._screen = screen
        self._title = title
        self._cycles = cycles
        self._now = ""
        self._lines: list[Line] = []

    def now(self, text: str) -> None:
        """What goes on."""
        self._now = text

    def add(self, line: Line) -> None:
        """A cycle committed."""
        self._lines.append(line)
        if not self._screen.is_live:
            self._screen.line(
                f"cycle {line.cycle}/{self._cycles}: version {line.version} serves after"
                f" {line.seconds:.3f} s: {phase_line(line.phases_s)};"
                f" all servers answer {token_line(line.tokens, 4)}"
            )

    @contextlib.asynccontextmanager
    async def watching(self, fleet: Fleet) -> AsyncIterator[None]:
        """Draw, from this event loop, until the block ends. The last picture stays."""
        if not self._screen.is_live:
            self._screen.line(self._title)
            yield
            return
        with Live(console=self._screen.console, auto_refresh=False) as live:
            painter = asyncio.create_task(self._paint(live, fleet))
            try:
                yield
                self.now("done")
            finally:
                painter.cancel()
                live.update(self._picture(fleet.status()), refresh=True)

    async def _paint(self, live: Live, fleet: Fleet) -> None:
        while True:
            live.update(self._picture(fleet.status()), refresh=True)
            await asyncio.sleep(FRAME_S)

    def _picture(self, status: FleetStatus) -> RenderableType:
        now = Text.assemble(("now  ", "dim"), (self._now, "bold"))
        parts: list[RenderableType] = [now, Text(), _servers(status, wide=self._screen.console.width >= WIDE)]
        if self._lines:
            parts += [Text(), self._history()]
        return Panel(
            Group(*parts),
            title=Text(f" {self._title} ", "bold"),
            title_align="left",
            border_style="blue",
            padding=(1, 1),
            expand=False,
        )

    def _history(self) -> Table:
        shown = [name for name in _COLUMNS if any(name in line.phases_s for line in self._lines)]
        table = _table()
        table.add_column("cycle", justify="right")
        table.add_column("serves", style="green")
        for name in shown:
            table.add_column(name, justify="right", style="dim")
        table.add_column("total ms", justify="right", style="bold")
        wide = self._screen.console.width >= WIDE + 16
        if wide:
            table.add_column("all servers answer")
        for line in self._lines[-HISTORY:]:
            phases = [milliseconds(line.phases_s.get(name, 0.0)) for name in shown]
            cells = [str(line.cycle), f"v{line.version}", *phases, milliseconds(line.seconds)]
            table.add_row(*cells, *([token_line(line.tokens, 4)] if wide else []))
        return table


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)


def _servers(status: FleetStatus, *, wide: bool) -> Table:
    table = _table()
    for name, width in (("server", 15), ("state", 14), ("weights", 7), ("gate", 8)):
        table.add_column(name, min_width=width)
    table.add_column("in flight", justify="right")
    table.add_column("memory")
    table.add_column("doing", min_width=8, no_wrap=True)
    for view in status.servers:
        table.add_row(
            short_name(view.server),
            Text(view.state.value, _STATES[view.state]),
            version_of(view),
            Text(view.gate.value, _GATES[view.gate]),
            _bar(status.in_flight.get(view.server, 0)),
            _memory(view, wide=wide),
            Text(_brief(doing(view)), "italic"),
        )
    return table


def _bar(count: int) -> str:
    return str(count) if count else "-"


def _brief(text: str) -> str:
    """A resume or release without its tags: the memory column shows them."""
    return text.split(" ", maxsplit=1)[0] if text.startswith(("release", "resume")) else text


def _memory(view: ServerView, *, wide: bool) -> Text:
    """What is resident, each at its place."""
    parts = []
    for tag, name, letter in _TAGS:
        shown = name if wide else letter
        held = tag in view.resident
        parts.append(Text(shown, "blue") if held else Text("." * len(shown), "dim"))
    return Text(" ").join(parts)
