"""What can happen next to a small fleet: answers, faults, callers and time, as data.

A command in flight is carried out and answered in one move, since nobody can look in between; or a fault
befalls it. Faults are paid from a budget, so that there are finitely many states.
"""

from collections.abc import Iterator
from typing import NamedTuple

from refitfsm.check.truth import TrueServer, carry_out, dead, started
from refitfsm.model.fleet import Cycle, FleetView, Goal, Phase
from refitfsm.model.rules import Rules
from refitfsm.model.states import Condition, ServerState
from refitfsm.model.table import BOOK, Book
from refitfsm.model.values import (
    NOTHING_REPORTED,
    Capabilities,
    CommandKind,
    Event,
    EventName,
    Pending,
    Report,
    ServerView,
)
from refitfsm.planner.cycle import Abandon, Decide, Input, ServerEvent, Tick, decide
from refitfsm.planner.requests import Request


class State(NamedTuple):
    """A fleet as it is believed to be and as it is."""

    fleet: FleetView
    truth: tuple[TrueServer, ...]
    """In the order of the fleet's servers."""
    faults: int
    """How many more faults there may be."""
    serving: int = 0
    """The push whose weights the fleet serves."""


class Move(NamedTuple):
    """One thing that happens."""

    name: str
    server: str
    """Empty: it is about the whole fleet."""
    given: Input | None
    """What the controller is told; None: it does not notice."""
    now_s: float
    state: State
    """Before the controller decides."""
    is_fault: bool
    fatal: str = ""
    """Why a server died of a command that no fault befell."""


class Fault(NamedTuple):
    """What can befall a command."""

    name: str
    applied: bool
    """The server carries it out all the same."""
    event: EventName
    """What the driver reports."""
    kills: bool = False


FAULTS: tuple[Fault, ...] = (
    Fault("request lost", False, EventName.LOST),
    Fault("answer lost", True, EventName.LOST),
    Fault("refused", False, EventName.REFUSED),
    Fault("fails", False, EventName.FAILED),
    Fault("fails after it was done", True, EventName.FAILED),
    Fault("server dies", False, EventName.DIED, kills=True),
    Fault("server dies unnoticed", False, EventName.LOST, kills=True),
)
_OF_A_DRAIN = ("request lost",)
"""A drain sends nothing."""


class World(NamedTuple):
    """What stays the same throughout."""

    rules: Rules
    able: Capabilities
    chunks: int
    decide: Decide = decide
    """What is checked."""
    book: Book = BOOK
    """The rules that it goes by."""


def moves(state: State, world: World) -> Iterator[Move]:
    """Everything that can happen in a state."""
    for index, (name, view) in enumerate(state.fleet.servers.items()):
        if view.pending is not None:
            yield from _answers(state, index, name, view.pending, world)
        if is_out(view):
            continue
        for what, after in unnoticed(state.truth[index], world) if state.faults else ():
            yield Move(what, name, None, 0.0, _with(state, index, after, paid=1), True)
    cycle = state.fleet.cycle
    if cycle is None:
        yield from _requests(state, world)
    elif state.faults:
        yield from _interruptions(state, cycle)


def _with(state: State, index: int, true: TrueServer, *, paid: int = 0) -> State:
    truth = (*state.truth[:index], true, *state.truth[index + 1 :])
    return state._replace(truth=truth, faults=state.faults - paid)


def _answers(state: State, index: int, name: str, pending: Pending, world: World) -> Iterator[Move]:
    pushes = state.fleet.servers[name].content.cycle == pending.cycle
    for each in outcomes(state.truth[index], pending, world, pushes=pushes, faults=state.faults > 0):
        told = Event(each.event, cycle=pending.cycle, seq=pending.seq, report=each.report)
        after = _with(state, index, each.true, paid=each.is_fault)
        yield Move(each.name, name, ServerEvent(name, told), 0.0, after, each.is_fault, each.fatal)


class Outcome(NamedTuple):
    """What can become of a command in flight: what the driver reports, and what the server is then."""

    name: str
    event: EventName
    report: Report
    true: TrueServer
    is_fault: bool
    fatal: str = ""


def outcomes(
    true: TrueServer, pending: Pending, world: World, *, pushes: bool, faults: bool
) -> Iterator[Outcome]:
    """The answer of a server that no fault befalls; then, if there may be any, what each fault makes of it.

    Args:
        pushes: the weights in the server's memory are of the cycle that is open, so its trainer has them.
    """
    kind = pending.command.kind
    reply = carry_out(true, pending, world.able, pending.cycle if pushes else None)
    yield Outcome(f"{kind}: {reply.event}", reply.event, reply.report, reply.server, False, reply.fatal)
    for fault in FAULTS if faults else ():
        if kind is CommandKind.DRAIN and fault.name not in _OF_A_DRAIN:
            continue
        if not true.alive and (fault.applied or fault.kills):
            continue
        after = true
        if fault.kills:
            after = dead(true)
        elif fault.applied:
            if reply.event in (EventName.DIED, EventName.REFUSED):
                continue
            after = reply.server
        yield Outcome(f"{kind}: {fault.name}", fault.event, NOTHING_REPORTED, after, True)


UNNOTICED = ("server dies", "server is started again")


def unnoticed(true: TrueServer, world: World) -> Iterator[tuple[str, TrueServer]]:
    """What can befall a server without anybody's notice, as faults do."""
    if true.alive:
        yield UNNOTICED[0], dead(true)
    if true.same:
        yield UNNOTICED[1], started(world.chunks)


def is_out(view: ServerView) -> bool:
    """Whether nothing is ever asked of a server again: what it is, and what is believed of it, is all one."""
    offline = view.state is ServerState.OFFLINE and view.pending is None and view.seq > 0
    return offline or view.condition in (Condition.SUSPECT, Condition.RETIRED)


def _interruptions(state: State, cycle: Cycle) -> Iterator[Move]:
    paid = state._replace(faults=state.faults - 1)
    if cycle.phase is Phase.WORKING:
        yield Move("the caller gives up", "", Abandon("the caller gave up"), 0.0, paid, True)
    yield Move("the time is up", "", Tick(), cycle.closes_s, paid, True)


def _requests(state: State, world: World) -> Iterator[Move]:
    for request in requests(state.fleet.serving_version, world):
        yield Move(f"asked: {request.goal}", "", request, 0.0, state, False)


def requests(serving_version: int, world: World) -> tuple[Request, ...]:
    """All that callers ask of a fleet that is enrolled."""
    new, sizes = serving_version + 1, (1,) * world.chunks
    return (
        Request(Goal.RELEASE),
        Request(Goal.RESUME),
        Request(Goal.REFIT, new, sizes),
        Request(Goal.STAGE, new, sizes),
        Request(Goal.COMMIT, new),
        Request(Goal.FLUSH),
    )
