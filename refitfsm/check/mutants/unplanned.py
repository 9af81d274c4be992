"""One server under the table alone: anything may be asked of it, in any order, and nobody plans.

A planner that asks only for what is right never tries most guards. So here every command with every choice of
tags, version and chunk is asked for in every state; what the table takes is carried out, and what it refuses
is not. Versions and cycles turn when they may: a commit wherever a server is ready, an end without one at any
time.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations

from refitfsm.check import laws, steps
from refitfsm.check.moves import Move, State, World, is_out, outcomes, unnoticed
from refitfsm.check.truth import UNDEFINED, TrueServer
from refitfsm.model.fleet import Cycle, FleetView, Goal, holds_staged
from refitfsm.model.row import Verdict
from refitfsm.model.states import ALL_TAGS, Condition, ServerState, Tag
from refitfsm.model.values import Command, CommandKind, Event, EventName, Pending, Report, ServerView
from refitfsm.planner.cycle import ServerEvent, Tick
from refitfsm.planner.judge import apply, judge

NAME = "s0"
_WHY = "why"
_BAD_ENDS = frozenset({EventName.REFUSED, EventName.FAILED, EventName.LOST, EventName.DIED})


def begin(faults: int, world: World, *, owned: bool = False) -> State:
    """A server of which nothing is known, and a cycle that is open.

    Args:
        owned: somebody else has paused it.
    """
    return State(
        FleetView({NAME: ServerView(NAME)}, cycle=_cycle(1, 1), last_cycle=1),
        (TrueServer(chunks=(0,) * world.chunks, paused=owned),),
        faults,
    )


def _cycle(number: int, version: int) -> Cycle:
    return Cycle(number, Goal.REFIT, frozenset({NAME}), version)


def moves(state: State, world: World) -> Iterator[Move]:
    """Everything that can happen to the server."""
    view, true = state.fleet.servers[NAME], state.truth[0]
    if view.pending is not None:
        yield from _answers(state, view.pending, world)
    if is_out(view):
        yield from _requests(state, view, world)
        return
    for what, after in unnoticed(true, world) if state.faults else ():
        yield Move(what, NAME, None, 0.0, _with(state, after, paid=1), True)
    yield from _requests(state, view, world)
    if view.pending is None:
        yield from _turns(state, view)


def _with(state: State, true: TrueServer, *, paid: int = 0) -> State:
    return state._replace(truth=(true,), faults=state.faults - paid)


def _answers(state: State, pending: Pending, world: World) -> Iterator[Move]:
    pushes = state.fleet.servers[NAME].content.cycle == pending.cycle
    meant = pending
    if pending.command.kind in (CommandKind.RELEASE, CommandKind.RESUME) and not pending.command.tags:
        meant = pending._replace(command=pending.command._replace(tags=ALL_TAGS))  # to SGLang, none are all
    for each in outcomes(state.truth[0], meant, world, pushes=pushes, faults=state.faults > 0):
        why = _WHY if each.event in _BAD_ENDS else ""
        told = Event(each.event, cycle=pending.cycle, seq=pending.seq, report=each.report, detail=why)
        after = _with(state, each.true, paid=each.is_fault)
        yield Move(each.name, NAME, ServerEvent(NAME, told), 0.0, after, each.is_fault, each.fatal)
    for name, report, true in _by_others(state.truth[0], pending, world, written=pushes):
        told = Event(EventName.REFUSED, cycle=pending.cycle, seq=pending.seq, report=report, detail=_WHY)
        yield Move(name, NAME, ServerEvent(NAME, told), 0.0, _with(state, true), False)


def _by_others(
    true: TrueServer, pending: Pending, world: World, *, written: bool
) -> Iterator[tuple[str, Report, TrueServer]]:
    """Somebody else opens a session before ours, or ends ours and leaves what they like."""
    if not (true.alive and true.same and world.able.sessions):
        return
    kind = pending.command.kind
    if kind is CommandKind.BEGIN and not (true.session or written):
        yield "begin: another's is open", Report(session_open=True), true._replace(session=True)
    if kind is CommandKind.END and true.session:
        torn = true._replace(session=False, chunks=(UNDEFINED,) * world.chunks, label=UNDEFINED)
        yield "end: another ended it", Report(session_closed=True), torn


def _requests(state: State, view: ServerView, world: World) -> Iterator[Move]:
    cycle = state.fleet.cycle
    number = cycle.id if cycle else 0
    for command in _commands(state.fleet.serving_version, view.content.version, world.chunks):
        asked = Event(EventName(command.kind.value), command, number, deadline_s=1.0)
        yield Move(f"asked: {command.kind}", NAME, ServerEvent(NAME, asked), 0.0, state, False)


@cache
def _commands(serving: int, held: int, chunks: int) -> tuple[Command, ...]:
    """Every command that is worth telling apart."""
    found = []
    for kind in CommandKind:
        if kind in (CommandKind.RELEASE, CommandKind.RESUME):
            found += [Command(kind, tags=tags) for tags in _subsets()]
        elif kind is CommandKind.PUSH:
            found += [
                Command(kind, version=version, chunk=chunk, chunks=chunks, chunk_bytes=1)
                for version in (serving, serving + 1)
                for chunk in range(chunks)
            ]
        elif kind in (CommandKind.VERIFY, CommandKind.CONTINUE):
            found += [Command(kind, version=version) for version in sorted({serving, serving + 1, held})]
        else:
            found.append(Command(kind))
    return tuple(found)


@cache
def _subsets() -> tuple[frozenset[Tag], ...]:
    tags = sorted(ALL_TAGS)
    return tuple(frozenset(some) for size in range(len(tags) + 1) for some in combinations(tags, size))


def _turns(state: State, view: ServerView) -> Iterator[Move]:
    """The cycle ends: with a commit where the server is ready for it, or without."""
    fleet = state.fleet
    cycle = fleet.cycle
    if cycle is None:
        return
    opened = _cycle(cycle.id + 1, fleet.serving_version + 1)
    ended = Event(EventName.UNCOMMITTED, cycle=cycle.id, detail=_WHY)
    aborted = state._replace(fleet=fleet._replace(cycle=opened, last_cycle=opened.id))
    yield Move("ends without a commit", NAME, ServerEvent(NAME, ended), 0.0, aborted, False)
    ready = view.state is ServerState.KV_REBUILT and holds_staged(view, cycle.id, cycle.version)
    if ready:
        after = fleet._replace(
            serving_version=cycle.version,
            serving_push=cycle.id,
            cycle=_cycle(cycle.id + 1, cycle.version + 1),
            last_cycle=cycle.id + 1,
        )
        committed = state._replace(fleet=after, serving=cycle.id)
        yield Move("commits", NAME, Tick(), 0.0, committed, False)


def play(state: State, move: Move, world: World) -> tuple[State, str]:
    """The state after a move, and the law that is broken on the way, if one is."""
    if move.fatal:
        return state, f"no_command_kills: died of {move.fatal}"
    if not isinstance(move.given, ServerEvent):
        return move.state, ""
    try:
        return _played(move.state, move.given.event, world)
    except AssertionError as error:
        return state, f"every_event_has_an_answer: {error}"


def _played(after: State, event: Event, world: World) -> tuple[State, str]:
    before, facts = after.fleet.servers[NAME], after.fleet.facts
    judgement = judge(before, event, facts, world.book)
    if judgement.verdict is not Verdict.TAKE:
        return after, steps.unheard(before, event, judgement.verdict, judgement.rule, judgement.remedy)
    view = apply(before, event, facts, judgement.row, world.book)
    why = steps.unlawful(steps.Step(before, event, facts, view))
    view = view._replace(attempts=min(1, view.attempts))  # it takes a planner to count them
    after = after._replace(fleet=after.fleet._replace(servers={NAME: view}))
    return after, why or _asked_in_vain(after, view, world)


def _asked_in_vain(state: State, view: ServerView, world: World) -> str:
    """The law that is broken where anything is taken that a suspect is asked.

    Judged at once, since all suspects are one state to a search.
    """
    if view.condition is not Condition.SUSPECT:
        return ""
    for move in _requests(state, view, world):
        asked = move.given
        if isinstance(asked, ServerEvent):
            judgement = judge(view, asked.event, state.fleet.facts, world.book)
            if judgement.verdict is not Verdict.REFUSE:
                return f"a_suspect_is_left_alone: it takes {asked.event.name} in {view.state}"
    return ""


def _laws(state: State, _world: World) -> str:
    true, served = state.truth[0], state.fleet.serving_version
    if true.alive and true.label == served and true.push not in (UNDEFINED, state.serving):
        return "a_version_names_one_push: other weights go by the version that is served"
    return laws.broken(state)


def _late(state: State, world: World) -> str:
    try:
        return laws.moved_by_a_late_answer(state.fleet.servers[NAME], state.fleet.facts, world.book)
    except AssertionError as error:
        return f"every_event_has_an_answer: {error}"


JUDGES = (_laws, _late)
"""Each says which law a state breaks; empty if none."""
