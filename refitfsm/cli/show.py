"""What the commands print: lines for people, one JSON object for programs, errors in one line.

With `--json` nothing but the object goes to stdout. Errors always go to stderr.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from refitfsm.errors import ConfigError
from refitfsm.model.fleet import admits
from refitfsm.model.values import CommandKind, ServerView
from refitfsm.reports import CycleReport, FleetStatus

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

EXIT_OK, EXIT_NO, EXIT_USAGE, EXIT_ABORTED, EXIT_LOST, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130


class Screen:
    """Standard output of one command."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False, quiet=as_json)

    @property
    def is_live(self) -> bool:
        """Whether something may be drawn over again: a person watches."""
        return self.console.is_terminal and not self.as_json

    def line(self, text: str, style: str = "") -> None:
        """One line for people; never wrapped, so that a script can read it."""
        self.console.print(text, style=style or None, markup=False, soft_wrap=True)

    def result(self, data: Mapping[str, Json]) -> None:
        """The JSON object, if it was asked for. The last thing a command prints."""
        if self.as_json:
            sys.stdout.write(json.dumps(data) + "\n")
            sys.stdout.flush()


def error_line(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    sys.stdout.flush()
    console = Console(stderr=True, highlight=False)
    console.print("refitfsm:", style="bold red", end=" ")
    console.print(" ".join(message.split()), markup=False, soft_wrap=True)


def key_from(variable: str | None) -> str | None:
    """The key that an environment variable holds. Keys are never taken from the command line.

    Raises:
        ConfigError: the variable is not set, or empty.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"environment variable {variable}: is not set; export it with the key in it")
    return key


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; give another path") from error


def milliseconds(seconds: float) -> str:
    """`0.7`, `12`, `1,204`: three digits are enough to compare."""
    value = 1000 * seconds
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


ORDER = tuple(kind.value for kind in CommandKind)


def merged(reports: Iterable[CycleReport]) -> dict[str, float]:
    """Seconds by phase over several cycles, in the order of a cycle."""
    total: dict[str, float] = {}
    for report in reports:
        for phase, seconds in report.phases_s.items():
            total[phase] = total.get(phase, 0.0) + seconds
    return {phase: total[phase] for phase in ORDER if phase in total}


def phase_line(phases_s: Mapping[str, float]) -> str:
    """`drain 52, pause 3.1, flush 4.4 ms`."""
    return ", ".join(f"{phase} {milliseconds(seconds)}" for phase, seconds in phases_s.items()) + " ms"


def token_line(tokens: Sequence[int], count: int = 8) -> str:
    """The first tokens of an answer."""
    more = " ..." if len(tokens) > count else ""
    return " ".join(map(str, tokens[:count])) + more


def short_name(server: str) -> str:
    """A server's address without its scheme."""
    return server.partition("://")[2] or server


def version_of(view: ServerView) -> str:
    """What a server's weights are: `v3`, `-> v4`, or a dash while they are undefined."""
    content = view.content
    if content.proved:
        return f"v{content.version}"
    return f"-> v{content.version}" if content.version > 0 else "-"


def doing(view: ServerView) -> str:
    """The command in flight to a server."""
    if view.pending is None:
        return ""
    command = view.pending.command
    if command.kind is CommandKind.PUSH:
        return f"push {command.chunk + 1}/{command.chunks}"
    return " ".join((command.kind.value, *(tag.value for tag in sorted(command.tags))))


def report_json(report: CycleReport) -> dict[str, Json]:
    """A cycle's report as plain data."""
    return {
        "cycle": report.cycle,
        "seconds": round(report.seconds, 6),
        "phases_s": {phase: round(seconds, 6) for phase, seconds in report.phases_s.items()},
        "failed": [{"server": server, "reason": reason} for server, reason in report.failed],
    }


def servers_json(status: FleetStatus) -> list[Json]:
    """What is believed of each server, as plain data."""
    return [
        {
            "server": view.server,
            "state": view.state.value,
            "condition": view.condition.value,
            "gate": view.gate.value,
            "serves": admits(view),
            "version": view.content.version if view.content.proved else None,
            "sglang_version": view.capabilities.sglang_version,
            "reason": view.reason,
        }
        for view in status.servers
    ]
