"""Two layers that look for mutants, and know nothing of each other: every state, and walks at random."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from refitfsm.check.mutants.games import free_games, planned_games
from refitfsm.check.mutants.graph import Found, Game, Graph, Rule, search, walk
from refitfsm.check.mutants.rules import Mutant
from refitfsm.model.states import ServerState
from refitfsm.model.table import BOOK
from refitfsm.model.values import EventName

WALKS = 80
"""Of the random layer, for each mutant and game."""
SPARE = 2_000
"""States that a mutant may have beyond those of the rules that ship, before its search gives up."""


class Tried(NamedTuple):
    """What became of a mutant in one layer."""

    mutant: Mutant
    found: Found | None
    game: str
    """In which it was found, or empty."""
    differs: bool
    """Something that can happen within the bounds leads elsewhere: if not, the mutant is equivalent there."""


class Unsound(AssertionError):
    """The rules that ship break a law: nothing is learned from mutants."""


def _sound(game: Game, graph: Graph) -> int:
    """The number of states under the rules that ship.

    Raises:
        Unsound: they break a law.
    """
    nowhere = Rule((ServerState.OFFLINE, EventName.ENROL), BOOK)
    sound = search(graph, nowhere)
    if sound.found is not None:
        raise Unsound(f"{game.name}: {sound.found.law}")
    return sound.states


def small_games() -> Iterator[Game]:
    """Such as can be searched to the last state."""
    yield from planned_games(1, 0)
    yield from free_games(0)
    yield from planned_games(1, 1)


def large_games() -> Iterator[Game]:
    """Such as can only be walked through."""
    yield from free_games(2)
    yield from planned_games(1, 2)
    yield from planned_games(2, 1)


def every_state(mutants: Sequence[Mutant], games: Iterable[Game] | None = None) -> Iterator[Tried]:
    """Search each mutant in game after game, until a law is broken. Default: the small games."""
    differ: dict[str, bool] = {mutant.name: False for mutant in mutants}
    left = list(mutants)
    for game in small_games() if games is None else games:
        if not left:
            return
        graph = Graph(game, BOOK)
        states_max = _sound(game, graph) + SPARE
        survivors = []
        for mutant in left:
            done = search(graph, mutant.rule, states_max=states_max)
            if done.found is not None:
                where = f"{game.name}, {game.faults} faults"
                yield Tried(mutant, done.found, where, True)
            else:
                differ[mutant.name] |= done.differs
                survivors.append(mutant)
        left = survivors
    for mutant in left:
        yield Tried(mutant, None, "", differ[mutant.name])


def at_random(mutants: Sequence[Mutant], seed: str, games: Iterable[Game] | None = None) -> Iterator[Tried]:
    """Walk through games under each mutant, until a law is broken. Default: the large games.

    Args:
        seed: one seed walks the same ways.
    """
    left = list(mutants)
    for game in large_games() if games is None else games:
        if not left:
            return
        graph = Graph(game, BOOK)
        survivors = []
        for mutant in left:
            dice = random.Random(f"{seed} {mutant.name} {game.name}")  # noqa: S311 - nothing to keep secret
            rule = mutant.rule
            found = next(filter(None, (walk(graph, rule, dice)[0] for _ in range(WALKS))), None)
            if found is not None:
                yield Tried(mutant, found, f"{game.name}, {game.faults} faults", True)
            else:
                survivors.append(mutant)
        left = survivors
    for mutant in left:
        yield Tried(mutant, None, "", False)
