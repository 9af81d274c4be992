"""`refitfsm mutants`: whether each thing that a row of the table says is needed by some law."""

import random
import time
from collections import Counter
from typing import Annotated

import typer

from refitfsm.check.mutants.layers import Fate, Tried, at_random, every_state
from refitfsm.check.mutants.rules import KINDS, mutants
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Json, Screen

HELP = (
    "Change one thing in one row of the table at a time, and look for a law that minds.\n\n"
    "Every guard is removed and negated, every row dropped and redirected, every effect dropped. Each is"
    " played through small games, to the last state, and by walks at random. A change that makes no"
    " difference to anything that can happen there is counted apart, and so is one whose search gave up."
    " Exits 1 if a change makes a difference and no law minds."
)
EXAMPLES = """Examples:

refitfsm mutants

refitfsm mutants --sample 40 --seed "$(git rev-parse HEAD)"
"""


def run(
    *,
    sample: Annotated[int, typer.Option(min=0, help="Only so many, drawn by the seed; 0: all.")] = 0,
    seed: Annotated[str, typer.Option(help="Any text: of the sample and of the walks.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try them, and print what was found."""
    screen = Screen(as_json=as_json)
    chosen = list(mutants())
    if sample:
        dice = random.Random(seed)  # noqa: S311 - nothing to keep secret
        chosen = dice.sample(chosen, min(sample, len(chosen)))
    began = time.perf_counter()
    exhaustive = list(every_state(chosen))
    middle = time.perf_counter()
    walked = list(at_random(chosen, seed))
    ended = time.perf_counter()
    _table(screen, exhaustive, walked)
    unexplained = []
    for each in exhaustive:
        if each.fate in (Fate.SURVIVES, Fate.UNDECIDED):
            screen.line(f"{each.fate}: {each.mutant.name}")
            if each.fate is Fate.SURVIVES:
                unexplained.append(each.mutant.name)
    screen.line(f"every state in {middle - began:.1f} s, at random in {ended - middle:.1f} s")
    screen.result(
        {
            "good": not unexplained,
            "survivors": unexplained,
            "every_state": [_as_json(each) for each in exhaustive],
            "at_random": [_as_json(each) for each in walked],
        }
    )
    raise typer.Exit(EXIT_NO if unexplained else EXIT_OK)


_COLUMNS = (Fate.FOUND, Fate.ALIKE, Fate.SURVIVES, Fate.UNDECIDED)


def _table(screen: Screen, exhaustive: list[Tried], walked: list[Tried]) -> None:
    fates = Counter((each.mutant.kind, each.fate) for each in exhaustive)
    random_ = Counter(each.mutant.kind for each in walked if each.fate is Fate.FOUND)
    screen.line(f"{'':16} {'mutants':>8} {' '.join(f'{each:>14}' for each in _COLUMNS)} {'at random':>10}")
    rows = [(kind, [fates[kind, fate] for fate in _COLUMNS], random_[kind]) for kind in KINDS]
    rows.append(
        (
            "all",
            [sum(column) for column in zip(*(counts for _, counts, _ in rows), strict=True)],
            random_.total(),
        )
    )
    for name, counts, by_chance in rows:
        shown = " ".join(f"{count:14}" for count in counts)
        screen.line(f"{name:16} {sum(counts):8} {shown} {by_chance:10}")
    laws = Counter(each.found.law.partition(":")[0] for each in exhaustive if each.found)
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
