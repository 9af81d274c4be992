"""Search for what is wrong in a planner that need not be right: `search`, and the laws of decisions.

Breadth first as well, so the first way found is a shortest one. Other than `search` it takes a planner that
raises or comes to no end as one that breaks a law, and pushes that say they were done and were not.
"""

import time
from collections import deque
from collections.abc import Iterator
from itertools import chain

from refitfsm.check import laws
from refitfsm.check.decisions import Unlawful, watched
from refitfsm.check.healing import never_heals
from refitfsm.check.moves import Move, State, World, moves
from refitfsm.check.normal import Key, Normaliser
from refitfsm.check.search import Broken, Result, Seen, start, step
from refitfsm.model.values import CommandKind, Event, EventName, ServerView
from refitfsm.planner.cycle import ServerEvent


def hunt(servers: int, faults: int, world: World, *, lies: bool = False, states_max: int = 100_000) -> Result:
    """Reach every state, and judge each and each decision; stop at the first law that is broken.

    Args:
        lies: pushes may also be answered as done that were not, as a fault. A right planner sees through it
            only under a policy that compares content.
        states_max: give up after so many; `Result.complete` is false then.
    """
    began = time.perf_counter()
    here = world._replace(decide=watched(world.decide))
    result, normal, judge = Result(), Normaliser(), _Judge(here)
    ways: list[tuple[int, Move | None]] = [(-1, None)]
    try:
        first, key = normal(start(servers, faults, here))
    except Unlawful as error:
        result.broken = Broken(str(error), ())
        return result
    known: set[Key] = {key}
    queue: deque[tuple[int, State]] = deque([(0, first)])
    while queue and result.broken is None and len(known) < states_max:
        index, state = queue.popleft()
        for move in chain(moves(state, here), _lies(state) if lies else ()):
            result.edges += 1
            after, why = _step(state, move, here, result.seen)
            if not why:
                after, key = normal(after)
                if key in known:
                    continue
                known.add(key)
                ways.append((index, move))
                queue.append((len(ways) - 1, after))
                why = judge(after)
            if why:
                result.broken = Broken(why, (*_way(index, ways), move))
                break
    result.states, result.complete = len(known), not queue
    result.seconds = time.perf_counter() - began
    return result


def _way(index: int, ways: list[tuple[int, Move | None]]) -> tuple[Move, ...]:
    made: list[Move] = []
    while True:
        index, move = ways[index]
        if move is None:
            return tuple(reversed(made))
        made.append(move)


def _step(state: State, move: Move, world: World, seen: Seen) -> tuple[State, str]:
    try:
        return step(state, move, world, seen)
    except Unlawful as error:
        return state, str(error)


class _Judge:
    """The first law that a state breaks. What comes late is judged once for each view of a server."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._views: set[ServerView] = set()

    def __call__(self, state: State) -> str:
        why = laws.broken(state)
        if why:
            return why
        for view in state.fleet.servers.values():
            if view not in self._views:
                self._views.add(view)
                why = laws.moved_by_a_late_answer(view, state.fleet.facts, self._world.book)
                if why:
                    return why
        if state.fleet.cycle is not None:
            return ""
        try:
            return never_heals(state, self._world)
        except Unlawful as error:
            return str(error)


def _lies(state: State) -> Iterator[Move]:
    """Pushes that are answered as done and were not carried out."""
    for name, view in state.fleet.servers.items():
        pending = view.pending
        if state.faults and pending is not None and pending.command.kind is CommandKind.PUSH:
            told = Event(EventName.PUSHED, cycle=pending.cycle, seq=pending.seq)
            paid = state._replace(faults=state.faults - 1)
            yield Move("push: done, it says", name, ServerEvent(name, told), 0.0, paid, True)
