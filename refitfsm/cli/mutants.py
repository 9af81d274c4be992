"""`refitfsm mutants`: whether each thing that a row of the table says is needed by some law."""

import random
import time
from collections import Counter
from typing import Annotated

import typer

from refitfsm.check.mutants.layers import Fate, Tried, at_random, by_draws, every_belief, every_state
from refitfsm.check.mutants.rules import KINDS, Mutant, mutants
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Json, Screen

HELP = (
    "Change one thing in one row of the table at a time, and look for a law that minds.\n\n"
    "Every guard is removed and negated, every row dropped and redirected, every effect dropped. Each change"
    " is judged by one step from every belief that a server could be held in, and by steps from beliefs that"
    " are drawn. With --games, which takes minutes, each is also played by servers as they are, through every"
    " state of small games and by walks at random. Exits 1 if there is a change that no law minds."
)
EXAMPLES = """Examples:

refitfsm mutants

refitfsm mutants --games --sample 40 --seed "$(git rev-parse HEAD)"
"""


def run(
    *,
    sample: Annotated[int, typer.Option(min=0, help="Only so many, drawn by the seed; 0: all.")] = 0,
    seed: Annotated[str, typer.Option(help="Any text: of the sample, of draws and walks.")] = "",
    games: Annotated[bool, typer.Option("--games", help="Play them too, state by state.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try them, and print what was found."""
    screen = Screen(as_json=as_json)
    chosen = list(mutants())
    if sample:
        dice = random.Random(seed)  # noqa: S311 - nothing to keep secret
        chosen = dice.sample(chosen, min(sample, len(chosen)))
    took: dict[str, float] = {}
    tried: dict[str, list[Tried]] = {}
    for layer in _LAYERS if games else _LAYERS[:2]:
        began = time.perf_counter()
        tried[layer] = _try(layer, chosen, seed)
        took[layer] = time.perf_counter() - began
    _table(screen, chosen, tried)
    _laws(screen, tried[_BELIEFS])
    survivors = _survivors(chosen, tried)
    for layer, results in tried.items():
        found = _found(results)
        for mutant in chosen:
            if mutant.name not in found and (layer in _STEPS or mutant.name in survivors):
                screen.line(f"not found, {layer}: {mutant.name}")
    screen.line(", ".join(f"{layer} in {seconds:.1f} s" for layer, seconds in took.items()))
    screen.result(
        {
            "good": not survivors,
            "mutants": len(chosen),
            "survivors": survivors,
            "layers": {layer: [_as_json(each) for each in tried[layer]] for layer in tried},
        }
    )
    raise typer.Exit(EXIT_NO if survivors else EXIT_OK)


_BELIEFS, _DRAWS, _STATES, _WALKS = "every belief", "beliefs drawn", "every state", "walks"
_LAYERS = (_BELIEFS, _DRAWS, _STATES, _WALKS)
_STEPS = (_BELIEFS, _DRAWS)
_OTHER_FATES = (Fate.ALIKE, Fate.SURVIVES, Fate.UNDECIDED)


def _try(layer: str, chosen: list[Mutant], seed: str) -> list[Tried]:
    if layer == _BELIEFS:
        return list(every_belief(chosen))
    if layer == _DRAWS:
        return list(by_draws(chosen, seed))
    return list(every_state(chosen) if layer == _STATES else at_random(chosen, seed))


def _found(tried: list[Tried]) -> set[str]:
    return {each.mutant.name for each in tried if each.found is not None}


def _survivors(chosen: list[Mutant], tried: dict[str, list[Tried]]) -> list[str]:
    """Such as no exhaustive layer has found."""
    found = set().union(*(_found(tried[layer]) for layer in (_BELIEFS, _STATES) if layer in tried))
    return [mutant.name for mutant in chosen if mutant.name not in found]


def _table(screen: Screen, chosen: list[Mutant], tried: dict[str, list[Tried]]) -> None:
    """How many are found of each kind, and what became of the others."""
    screen.line(f"{'':16} {'mutants':>8} {' '.join(f'{layer:>14}' for layer in tried)}")
    found = {layer: _found(results) for layer, results in tried.items()}
    for kind in (*KINDS, ""):
        names = [mutant.name for mutant in chosen if kind in ("", mutant.kind)]
        counts = " ".join(f"{sum(name in found[layer] for name in names):14}" for layer in tried)
        screen.line(f"{kind or 'all':16} {len(names):8} {counts}")
    for fate in _OTHER_FATES:
        of_fate = [sum(each.fate is fate for each in results) for results in tried.values()]
        if any(of_fate):
            screen.line(f"{fate:16} {'':8} {' '.join(f'{count:14}' for count in of_fate)}")


def _laws(screen: Screen, tried: list[Tried]) -> None:
    laws = Counter(each.found.law.partition(":")[0] for each in tried if each.found)
    for law, count in laws.most_common():
        screen.line(f"{count:6} break {law}")


def _as_json(tried: Tried) -> Json:
    return {
        "name": tried.mutant.name,
        "fate": tried.fate.value,
        "law": tried.found.law if tried.found else None,
        "moves": tried.found.moves if tried.found else None,
        "game": tried.game,
    }
