"""Layers that look for mutants, and know nothing of each other.

Two judge single steps, from every belief and from beliefs that are drawn. Two play games with servers as they
are, through every state and by walks at random.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from refitfsm.check.mutants.beliefs import Beliefs
from refitfsm.check.mutants.draws import drawn
from refitfsm.check.mutants.games import owned_game, plain_game, planned_games, unplanned_games
from refitfsm.check.mutants.graph import SPARE, Found, Game, Graph, search, walk
from refitfsm.check.mutants.rules import Mutant
from refitfsm.model.table import BOOK, Key

WALKS = 20
"""Of the random layer, for each mutant and game."""


class Fate(StrEnum):
    """What became of a mutant in one layer."""

    FOUND = "found"
    """A law minds."""
    ALIKE = "no difference"
    """Nothing that can happen within the bounds leads elsewhere: the mutant is equivalent there."""
    SURVIVES = "survives"
    """Something leads elsewhere, every state was reached, and no law minds."""
    UNDECIDED = "not decided"
    """Something leads elsewhere, and a search gave up before it had seen every state; or chance missed it."""


class Tried(NamedTuple):
    """A mutant, and what became of it in one layer."""

    mutant: Mutant
    fate: Fate
    found: Found | None = None
    game: str = ""
    """In which it was found, or empty."""


def small_games() -> Iterator[Game]:
    """Such as can be searched to the last state; what takes least and finds most comes first."""
    yield from planned_games(1, 0)
    yield owned_game()
    yield plain_game(1)
    yield from unplanned_games(0, 1)
    yield from planned_games(1, 1)
    yield from unplanned_games(0, 2)
    yield next(unplanned_games(1, 1))


def large_games() -> Iterator[Game]:
    """Such as are walked through, and reach farther."""
    yield from unplanned_games(2, 2)
    yield from planned_games(1, 2)
    yield from planned_games(2, 1)


def _where(game: Game) -> str:
    return f"{game.name}, {game.faults} faults"


def every_belief(mutants: Sequence[Mutant]) -> Iterator[Tried]:
    """Judge one step of each mutant from every belief. They come back by the cells that they change.

    Raises:
        Unsound: the rules that ship break a law.
    """
    by_cell: dict[Key, list[Mutant]] = {}
    for mutant in mutants:
        by_cell.setdefault(mutant.rule.key, []).append(mutant)
    for key, some in by_cell.items():
        beliefs = Beliefs(key)
        for mutant in some:
            done = beliefs.judge(mutant)
            unfound = Fate.SURVIVES if done.differs else Fate.ALIKE
            yield Tried(mutant, Fate.FOUND if done.found else unfound, done.found, "one step")


def by_draws(mutants: Sequence[Mutant], seed: str) -> Iterator[Tried]:
    """Judge single steps of each mutant from beliefs that are drawn, until a law is broken.

    Args:
        seed: one seed draws the same.
    """
    for mutant in mutants:
        found = drawn(mutant, random.Random(f"{seed} {mutant.name}"))  # noqa: S311 - nothing to keep secret
        yield Tried(mutant, Fate.FOUND if found else Fate.UNDECIDED, found, "one step")


def every_state(
    mutants: Sequence[Mutant], games: Iterable[Game] | None = None, *, spare: int = SPARE
) -> Iterator[Tried]:
    """Search each mutant in game after game, until a law is broken. Default: the small games.

    Args:
        spare: a search gives up after so many states more than the rules that ship have.

    Raises:
        Unsound: the rules that ship break a law.
    """
    fates = {mutant.name: Fate.ALIKE for mutant in mutants}
    left = list(mutants)
    for game in small_games() if games is None else games:
        if not left:
            return
        graph = Graph(game, BOOK)
        survivors = []
        for mutant in left:
            done = search(graph, mutant.rule, spare=spare)
            if done.found is not None:
                yield Tried(mutant, Fate.FOUND, done.found, _where(game))
                continue
            survivors.append(mutant)
            if not done.complete:
                fates[mutant.name] = Fate.UNDECIDED
            elif done.differs and fates[mutant.name] is Fate.ALIKE:
                fates[mutant.name] = Fate.SURVIVES
        left = survivors
    for mutant in left:
        yield Tried(mutant, fates[mutant.name])


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
                yield Tried(mutant, Fate.FOUND, found, _where(game))
            else:
                survivors.append(mutant)
        left = survivors
    for mutant in left:
        yield Tried(mutant, Fate.UNDECIDED)
