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

ASKS = "the_planner_asks_only_what_the_table_allows"
ENDS = "a_cycle_ends"
HEALS = "a_fleet_heals"
KILLS = "no_command_kills"
LATE = "a_late_answer_changes_nothing"
"""Laws of what comes next, and of what is asked: the others are of states, and have their names there."""


class Broken(NamedTuple):
    """A law that does not hold, and the way there."""

    law: str
    trace: tuple[Move, ...]


@dataclass
class Seen:
    """What a search has met."""

    rows: Counter[str] = field(default_factory=Counter)
    """How often each row of the table was taken."""
    turns: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    risks: Counter[str] = field(default_factory=Counter)
    """How often each law could have been broken, by its name."""

    def update(self, other: "Seen") -> None:
        """Add what another search has met."""
        self.rows.update(other.rows)
        self.turns.update(other.turns)
        self.faults.update(other.faults)
        self.risks.update(other.risks)


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
    seen: Seen = field(default_factory=Seen)


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
    judge = _Judge(world, result.seen.risks)
    while queue and result.broken is None and len(known) < states_max:
        index, state = queue.popleft()
        for number, move in enumerate(moves(state, world)):
            result.edges += 1
            after, why = step(state, move, world, result.seen)
            if not why:
                after, key = normal(after)
                if key in known:
                    continue
                known[key] = len(known)
                parents.append(index)
                taken.append(number)
                depths.append(depths[index] + 1)
                queue.append((len(known) - 1, after))
                why = judge(after)
            if why:
                choices = (*_choices(index, parents, taken), number)
                result.broken = Broken(why, _trace(first, choices, world, normal))
                break
    result.states, result.depth = len(known), depths[-1]
    result.complete = not queue
    result.seconds = time.perf_counter() - began
    return result


class _Judge:
    """The law that a new state breaks, if any. What comes late is judged once for each view of a server."""

    def __init__(self, world: World, risks: Counter[str]) -> None:
        self._world, self._risks = world, risks
        self._views: set[ServerView] = set()

    def __call__(self, state: State) -> str:
        for view in state.fleet.servers.values():
            if view not in self._views:
                self._views.add(view)
                self._risks[LATE] += 1
                why = laws.moved_by_a_late_answer(view, state.fleet.facts, self._world.book)
                if why:
                    return why
        why = laws.broken(state, self._risks)
        if not why and state.fleet.cycle is None:
            self._risks.update((HEALS, ENDS))
            why = never_heals(state, self._world)
        return why


def _choices(index: int, parents: "array[int]", taken: "array[int]") -> tuple[int, ...]:
    """The number of each move on the way to a state."""
    numbers = []
    while index > 0:
        numbers.append(taken[index])
        index = parents[index]
    return tuple(reversed(numbers))


def _trace(state: State, choices: tuple[int, ...], world: World, normal: Normaliser) -> tuple[Move, ...]:
    """The moves themselves. The same normaliser seats servers in the same order."""
    seen = Seen()
    made = []
    for number in choices:
        move = next(islice(moves(state, world), number, None))
        made.append(move)
        after, _ = step(state, move, world, seen)
        state, _ = normal(after)
    return tuple(made)


def step(state: State, move: Move, world: World, seen: Seen) -> tuple[State, str]:
    """The state after a move, and the law that is broken on the way, if one is."""
    if move.is_fault:
        seen.faults[move.name.partition(": ")[2] or move.name] += 1
    elif move.server:
        seen.risks[KILLS] += 1
    if move.fatal:
        return state, f"{KILLS}: {move.server} died of {move.fatal}"
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


def noted(decision: Decision, seen: Seen) -> str:
    """Count what was taken. Returns the law that is broken where the table refuses what the planner asks."""
    for record in decision.records:
        if isinstance(record, ServerRecord):
            if record.verdict is Verdict.TAKE:
                seen.rows[record.row] += 1
            if record.event.name in REQUESTS:
                seen.risks[ASKS] += 1
                if record.verdict is Verdict.REFUSE:
                    return f"{ASKS}: {record.event.name}: {record.rule}"
        else:
            seen.turns[record.turn] += 1
    return ""
