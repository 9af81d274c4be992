"""One state for all that differ in nothing that matters: names, numbers, times and words.

Servers are interchangeable, so they are sorted. Versions and cycles are only compared, so they are numbered
anew from the lowest. Of a command's number it only matters whether an answer is to it, and of times whether
they have come, which is a move of its own.
"""

from collections.abc import Mapping
from typing import NamedTuple

from refitfsm.check.moves import State, is_out
from refitfsm.check.truth import TrueServer
from refitfsm.model.fleet import Cycle, FleetView
from refitfsm.model.states import Condition, ServerState
from refitfsm.model.values import Command, CommandKind, Pending, ServerView

DEADLINE_S, CLOSES_S = 1.0, 2.0
Key = tuple[object, ...]
Numbers = Mapping[int, int]
_GONE = TrueServer(alive=False)
_OUT = {
    True: ServerView("", seq=1),
    False: ServerView("", state=ServerState.RELEASED, paused=True, condition=Condition.SUSPECT, seq=1),
}
"""Of a server that is offline, and of a suspect: the same whatever led there."""
_OF_A_VERSION = frozenset({CommandKind.PUSH, CommandKind.VERIFY, CommandKind.CONTINUE})


class Seat(NamedTuple):
    """All that is so of one server, whatever its name."""

    view: ServerView
    true: TrueServer
    member: bool
    failed: bool
    given_up: bool


class Normaliser:
    """Gives states their standing form. Equal forms have equal keys, in this process."""

    def __init__(self) -> None:
        self._seats: dict[Seat, int] = {}

    def __call__(self, state: State) -> tuple[State, Key]:
        """The state that stands for this one, and its key."""
        fleet, cycle = state.fleet, state.fleet.cycle
        cycles, versions = _cycles(state), _versions(state)
        failed = cycle.failed_servers if cycle else frozenset()
        keyed = []
        for (name, view), true in zip(fleet.servers.items(), state.truth, strict=True):
            out = is_out(view)
            seat = Seat(
                _OUT[view.state is ServerState.OFFLINE] if out else _view(view, cycles, versions),
                _GONE if out else _true(true, cycles, versions),
                cycle is not None and name in cycle.members,
                name in failed,
                cycle is not None and name in cycle.given_up,
            )
            keyed.append((self._seats.setdefault(seat, len(self._seats)), seat))
        keyed.sort(key=lambda pair: pair[0])
        after = _seated(state, [seat for _, seat in keyed], cycles, versions)
        now = after.fleet.cycle
        key = (
            *(number for number, _ in keyed),
            after.fleet.serving_version,
            after.fleet.staged,
            after.fleet.serving_push,
            after.serving,
            after.faults,
            (now.id, now.goal, now.version, now.phase) if now else None,
        )
        return after, key


def _numbered(found: set[int]) -> Numbers:
    return {each: rank for rank, each in enumerate(sorted(found))}


def _cycles(state: State) -> Numbers:
    fleet = state.fleet
    found = {0, fleet.staged, fleet.serving_push, state.serving}
    if fleet.cycle is not None:
        found.add(fleet.cycle.id)
    for view, true in zip(fleet.servers.values(), state.truth, strict=True):
        if is_out(view):
            continue
        found.add(view.content.cycle)
        found.add(view.session)
        found.update(true.chunks, true.cache)
        if view.pending is not None:
            found.add(view.pending.cycle)
        if view.checksum:
            found.add(int(view.checksum))
    found.discard(-1)
    return {-1: -1, **_numbered(found)}


def _versions(state: State) -> Numbers:
    fleet = state.fleet
    found = {fleet.serving_version}
    if fleet.cycle is not None:
        found.add(fleet.cycle.version)
    for view, true in zip(fleet.servers.values(), state.truth, strict=True):
        if is_out(view):
            continue
        found.update((view.content.version, true.label))
        if view.kv_epoch is not None:
            found.add(view.kv_epoch)
        if view.pending is not None and view.pending.command.kind in _OF_A_VERSION:
            found.add(view.pending.command.version)
    found.discard(-1)
    return {-1: -1, **_numbered(found)}


def _checksum(text: str, cycles: Numbers) -> str:
    return str(cycles[int(text)]) if text else ""


def _command(command: Command, versions: Numbers) -> Command:
    return command._replace(version=versions[command.version]) if command.kind in _OF_A_VERSION else command


def _view(view: ServerView, cycles: Numbers, versions: Numbers) -> ServerView:
    content, pending = view.content, view.pending
    return view._replace(
        server="",
        content=content._replace(version=versions[content.version], cycle=cycles[content.cycle]),
        kv_epoch=None if view.kv_epoch is None else versions[view.kv_epoch],
        session=cycles[view.session],
        pending=(
            None
            if pending is None
            else Pending(_command(pending.command, versions), cycles[pending.cycle], 1, DEADLINE_S)
        ),
        seq=1,
        checksum=_checksum(view.checksum, cycles),
        reason="",
    )


def _true(true: TrueServer, cycles: Numbers, versions: Numbers) -> TrueServer:
    return true._replace(
        chunks=tuple(cycles[each] for each in true.chunks),
        cache=frozenset(cycles[each] for each in true.cache),
        label=versions[true.label],
    )


def _seated(state: State, seats: list[Seat], cycles: Numbers, versions: Numbers) -> State:
    fleet, names = state.fleet, tuple(state.fleet.servers)
    seated = tuple(zip(names, seats, strict=True))
    cycle = fleet.cycle
    return State(
        FleetView(
            {name: seat.view._replace(server=name) for name, seat in seated},
            versions[fleet.serving_version],
            _cycle(cycle, seated, cycles, versions) if cycle else None,
            len(cycles) - 2,  # of 0 and -1 no cycle is numbered
            cycles[fleet.staged],
            cycles[fleet.serving_push],
        ),
        tuple(seat.true for seat in seats),
        state.faults,
        cycles[state.serving],
    )


def _cycle(cycle: Cycle, seated: tuple[tuple[str, Seat], ...], cycles: Numbers, versions: Numbers) -> Cycle:
    return cycle._replace(
        id=cycles[cycle.id],
        members=frozenset(name for name, seat in seated if seat.member),
        version=versions[cycle.version],
        started_s=0.0,
        deadline_s=DEADLINE_S,
        closes_s=CLOSES_S,
        failed=tuple((name, "") for name, seat in seated if seat.failed),
        reason="",
        given_up=frozenset(name for name, seat in seated if seat.given_up),
    )
