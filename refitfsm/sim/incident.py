"""What a journal says of a run, as far as it can be played again.

A journal has no prompts, no tensors and no times of calls; it has what each server answered. So a run is
taken for its requests, in turn, and for each the commands that did not end well.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from refitfsm.audit.lines import (
    GENESIS,
    FleetBody,
    Header,
    InputBody,
    ServerBody,
    body_of,
    changes_of,
    event_of,
    read_body,
    read_header,
)
from refitfsm.audit.verify import verify
from refitfsm.model.fleet import WITHOUT_COMMIT, Goal, Phase, admits
from refitfsm.model.records import InputKind, Turn
from refitfsm.model.table import Verdict
from refitfsm.model.values import (
    REQUESTS,
    Capabilities,
    Command,
    CommandKind,
    EventName,
    ServerView,
)

_BAD = (EventName.LOST, EventName.REFUSED, EventName.FAILED, EventName.DIED)
_REQUESTS = frozenset(REQUESTS)


class Trouble(NamedTuple):
    """A command that did not end well."""

    server: str
    command: Command
    number: int
    """Which of this kind it was for this server in this call, from 1."""
    ended: EventName
    by_deadline: bool
    """lost: no answer came."""


class Ending(NamedTuple):
    """How a call ended."""

    how: str
    """`reached`, `aborted`, `met already`, the rule that it was refused by, or `open`: not in the journal."""
    failed: frozenset[str] = frozenset()
    """Servers that dropped out."""


_OPEN = Ending("open")


@dataclass
class Call:
    """One thing that was asked of the fleet."""

    goal: Goal
    version: int
    ending: Ending = _OPEN
    troubles: list[Trouble] = field(default_factory=list)
    dead_before: list[str] = field(default_factory=list)
    """Servers that were seen dead since the call before."""
    given_up_at: list[tuple[str, Command, int]] | None = None
    """What was in flight when its caller left, if it did: server, command, and which of its kind."""


class Incident(NamedTuple):
    """A run, to be played again."""

    head: Header
    capabilities: Capabilities
    """Of the first server that was enrolled."""
    calls: tuple[Call, ...]
    beside: int
    """Requests that were refused because another was under way; they changed nothing, and are left out."""
    dead_after: tuple[str, ...]
    """Servers that were seen dead after the last call."""
    serving: int
    """Servers that admit requests at the end."""
    version: int
    """The version that the fleet serves at the end."""


def read_incident(lines: Iterable[bytes], name: str) -> Incident:
    """What a journal says of its run.

    Raises:
        AuditError: it does not hold.
    """
    kept = list(lines)
    verify(kept, name)
    return _Reader(kept).incident()


class _Reader:
    """Folds a journal that holds."""

    def __init__(self, lines: list[bytes]) -> None:
        previous, head = body_of(lines[0], GENESIS)
        self.head = read_header(head)
        self.views = {server: ServerView(server) for server in self.head.servers}
        self.calls: list[Call] = []
        self.beside = 0
        self.version = 0
        self._dead: list[str] = []
        self._counts: Counter[tuple[str, CommandKind]] = Counter()
        self._open = False
        self._tick = 0
        """The step that a time was up in."""
        for line in lines[1:]:
            previous, data = body_of(line, previous)
            body = read_body(data)
            if isinstance(body, InputBody):
                self._input(body)
            elif isinstance(body, FleetBody):
                self._turn(body)
            elif isinstance(body, ServerBody):
                self._server(body)

    def incident(self) -> Incident:
        found = [view.capabilities for view in self.views.values() if view.capabilities.sglang_version]
        serving = sum(map(admits, self.views.values()))
        return Incident(
            self.head,
            found[0] if found else Capabilities(),
            tuple(self.calls),
            self.beside,
            tuple(self._dead),
            serving,
            self.version,
        )

    def _input(self, body: InputBody) -> None:
        if body.given is InputKind.TICK:
            self._tick = body.step
        elif body.given is InputKind.ABANDON and self._open:
            pending = {name: view.pending for name, view in self.views.items() if view.pending}
            self.calls[-1].given_up_at = [
                (name, each.command, self._counts[name, each.command.kind]) for name, each in pending.items()
            ]
        elif body.given is InputKind.REQUEST and self._open:
            self.beside += 1
        elif body.goal is not None:
            self.calls.append(Call(body.goal, body.version, dead_before=self._dead))
            self._dead = []
            self._counts.clear()

    def _turn(self, body: FleetBody) -> None:
        if body.turn is Turn.OPENED:
            self._open = True
        elif body.turn is Turn.CLOSED and body.cycle is not None:
            cycle = body.cycle
            there = cycle.phase is (Phase.WORKING if cycle.goal in WITHOUT_COMMIT else Phase.COMMITTED)
            reached = there and len(cycle.failed) < len(cycle.members)
            self.calls[-1].ending = Ending(
                "reached" if reached else "aborted", cycle.failed_servers | cycle.given_up
            )
            self._open = False
        elif body.turn is Turn.REFUSED and not self._open:
            self.calls[-1].ending = Ending(body.reason.rpartition(": ")[2])
        elif body.turn is Turn.ABSORBED:
            self.calls[-1].ending = Ending("met already")
        self.version = body.serving_after

    def _server(self, body: ServerBody) -> None:
        event, before = event_of(bytes(body.event)), self.views[body.server]
        after = before._replace(**changes_of(body))  # type: ignore[arg-type]
        self.views[body.server] = after
        if body.verdict is not Verdict.TAKE:
            return
        if event.name in _REQUESTS and event.command is not None:
            self._counts[body.server, event.command.kind] += 1
        elif event.name in _BAD and before.pending is not None and self._open:
            command = before.pending.command
            number = self._counts[body.server, command.kind]
            timed_out = body.step == self._tick
            self.calls[-1].troubles.append(Trouble(body.server, command, number, event.name, timed_out))
        elif event.name is EventName.DIED:
            self._dead.append(body.server)
