"""Breadth first through all states of a small fleet, to the fixed point."""

import time
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from refitfsm.check import laws
from refitfsm.check.healing import never_heals
from refitfsm.check.moves import Move, State, World, moves
from refitfsm.check.normal import Key, Normaliser
from refitfsm.check.truth import TrueServer
from refitfsm.model.fleet import FleetView, Goal
from refitfsm.model.records import FleetRecord, ServerRecord, Turn
from refitfsm.model.table import Verdict
from refitfsm.model.values import REQUESTS, ServerView
from refitfsm.planner.cycle import Decision
from refitfsm.planner.requests import Request


class Broken(NamedTuple):
    """A law that does not hold, and the way there."""

    law: str
    trace: tuple[Move, ...]


@dataclass
class Result:
    """What a search has found."""

    states: int = 0
    edges: int = 0
    depth: int = 0
    """Of the last state: the length of the shortest way to the farthest."""
    complete: bool = False
    """Every state was reached."""
    seconds: float = 0.0
    broken: Broken | None = None
    rows: Counter[str] = field(default_factory=Counter)
    """How often each row of the table was taken."""
    turns: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


def start(servers: int, faults: int, world: World) -> State:
    """A fleet that is being enrolled."""
    fleet = FleetView.of(f"s{number}" for number in range(servers))
    opened = world.decide(fleet, Request(Goal.ENROL), 0.0, world.rules).fleet
    fresh = TrueServer(chunks=(0,) * world.chunks)
    return State(opened, (fresh,) * servers, faults)


def search(servers: int, faults: int, world: World, *, states_max: int = 5_000_000) -> Result:
    """Reach every state, and judge each; stops at the first law that is broken.

    Args:
        states_max: give up after so many; `Result.complete` is false then.
    """
    began = time.perf_counter()
    result = Result()
    normal = Normaliser()
    first, key = normal(start(servers, faults, world))
    known: dict[Key, int] = {key: 0}
    parents, taken, depths = array("l", [-1]), array("l", [-1]), array("l", [0])
    queue: deque[tuple[int, State]] = deque([(0, first)])
    views: set[ServerView] = set()

    def judged(state: State) -> str:
        """The law that a new state breaks. What comes late is judged once for each view of a server."""
        for view in state.fleet.servers.values():
            if view not in views:
                views.add(view)
                why = laws.moved_by_a_late_answer(view, state.fleet.facts, world.book)
                if why:
                    return why
        return laws.broken(state) or (never_heals(state, world) if state.fleet.cycle is None else "")

    while queue and result.broken is None and len(known) < states_max:
        index, state = queue.popleft()
        for number, move in enumerate(moves(state, world)):
            result.edges += 1
            after, why = step(state, move, world, result)
            if not why:
                after, key = normal(after)
                if key in known:
                    continue
                known[key] = len(known)
                parents.append(index)
                taken.append(number)
                depths.append(depths[index] + 1)
                queue.append((len(known) - 1, after))
                why = judged(after)
            if why:
                choices = (*_choices(index, parents, taken), number)
                result.broken = Broken(why, _trace(first, choices, world, normal))
                break
    result.states, result.depth = len(known), depths[-1]
    result.complete = not queue
    result.seconds = time.perf_counter() - began
    return result


def _choices(index: int, parents: "array[int]", taken: "array[int]") -> tuple[int, ...]:
    """The number of each move on the way to a state."""
    numbers = []
    while index > 0:
        numbers.append(taken[index])
        index = parents[index]
    return tuple(reversed(numbers))


def _trace(state: State, choices: tuple[int, ...], world: World, normal: Normaliser) -> tuple[Move, ...]:
    """The moves themselves. The same normaliser seats servers in the same order."""
    seen = Result()
    made = []
    for number in choices:
        move = next(islice(moves(state, world), number, None))
        made.append(move)
        after, _ = step(state, move, world, seen)
        state, _ = normal(after)
    return tuple(made)


def step(state: State, move: Move, world: World, seen: Result) -> tuple[State, str]:
    """The state after a move, and the law that is broken on the way, if one is."""
    if move.is_fault:
        seen.faults[move.name.partition(": ")[2] or move.name] += 1
    if move.fatal:
        return state, f"no_command_kills: {move.server} died of {move.fatal}"
    after = move.state
    if move.given is None:
        return after, ""
    decision = world.decide(after.fleet, move.given, move.now_s, world.rules)
    serving = serving_after(decision, after.serving, after.fleet.staged)
    return after._replace(fleet=decision.fleet, serving=serving), noted(decision, seen)


def serving_after(decision: Decision, serving: int, staged: int) -> int:
    """The push whose weights the fleet serves after a decision, by what was decided."""
    for record in decision.records:
        if isinstance(record, FleetRecord) and record.turn is Turn.COMMITTED and record.cycle is not None:
            if record.cycle.goal is Goal.REFIT:
                serving = record.cycle.id
            elif record.cycle.goal is Goal.COMMIT:
                serving = staged
    return serving


def noted(decision: Decision, seen: Result) -> str:
    """Count what was taken. Returns the law that is broken where the table refuses what the planner asks."""
    for record in decision.records:
        if isinstance(record, ServerRecord):
            if record.verdict is Verdict.TAKE:
                seen.rows[record.row] += 1
            elif record.verdict is Verdict.REFUSE and record.event.name in REQUESTS:
                return f"the_planner_asks_only_what_the_table_allows: {record.event.name}: {record.rule}"
        else:
            seen.turns[record.turn] += 1
    return ""
