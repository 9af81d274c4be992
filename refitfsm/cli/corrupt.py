"""`refitfsm audit corrupt`: what of all that can be done to an audit is noticed."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from refitfsm.audit.corruptions import CUT, KINDS, Corruption, corruptions
from refitfsm.audit.verify import verify, verify_file
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Json, Screen
from refitfsm.errors import AuditError, ConfigError
from refitfsm.replay import replay
from refitfsm.sim.journals import Recorded, recorded

HELP = (
    "Corrupt audits in every way there is, and count what `refitfsm audit verify` rejects.\n\n"
    "Lines are dropped, repeated, swapped, moved, cut; bits are flipped; and what a forger does who makes"
    " hashes, numbers and steps fit again. Each is judged by its own lines alone, and with the last hash that"
    " was kept elsewhere. What holds although it was forged is decided again: if the planner itself would"
    " have written it, it is another run's, which nothing but the hash can tell. Exits 1 if anything else"
    " holds.\n\n"
    "Without a FILE it takes audits of simulated fleets, calm and with faults, under several policies."
)
EXAMPLES = """Examples:

refitfsm audit corrupt

refitfsm audit corrupt run.jsonl --count 2000

refitfsm audit corrupt --count 13000 --seed 7
"""


class Fate(StrEnum):
    """What became of a corruption."""

    REJECTED = "rejected"
    """By its own lines."""
    ANOTHER = "another run's"
    """It holds, and the planner would have written it, had it been given that."""
    ENDS_EARLY = "ends early"
    """It holds as far as it goes, and is told by its missing end: `--closed` rejects it."""
    HOLDS = "holds"
    """It should not."""


def fate(corruption: Corruption) -> tuple[Fate, str]:
    """What becomes of a corruption without a hash that was kept; and its own last hash, if it holds."""
    try:
        found = verify(corruption.lines)
    except AuditError:
        return Fate.REJECTED, ""
    if corruption.kind == CUT:
        return Fate.HOLDS if found.ended else Fate.ENDS_EARLY, found.hash
    try:
        same = replay(corruption.lines).difference is None
    except AuditError:
        same = False
    return Fate.ANOTHER if same else Fate.HOLDS, found.hash


class Tried(NamedTuple):
    """What became of the corruptions of one kind."""

    kind: str
    fates: Counter[Fate]
    by_hash: int
    """Rejected with the last hash that was kept."""
    wrong: tuple[str, ...]
    """Those that hold and should not."""

    @property
    def made(self) -> int:
        return self.fates.total()


def attempts(journals: Sequence[Recorded], count: int, seed: str) -> Iterator[Tried]:
    """Try about as many of each kind on each journal; the same for the same seed."""
    each = -(-count // (len(journals) * len(KINDS)))
    for kind in KINDS:
        fates: Counter[Fate] = Counter()
        by_hash, wrong = 0, []
        for journal in journals:
            kept = verify(journal.lines).hash
            dice = random.Random(f"{seed} {kind} {journal.name}")  # noqa: S311 - nothing to keep secret
            for corruption in islice(corruptions(journal.lines, kind, dice), each):
                found, last = fate(corruption)
                fates[found] += 1
                by_hash += found is Fate.REJECTED or last != kept
                if found is Fate.HOLDS:
                    wrong.append(f"{journal.name}: {corruption.kind}: {corruption.says}")
        yield Tried(kind, fates, by_hash, tuple(wrong))


def run(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Audits that hold.", show_default=False)
    ] = None,
    *,
    count: Annotated[int, typer.Option(min=1, help="About how many corruptions, in all.")] = 1000,
    seed: Annotated[str, typer.Option(help="Any text; the same one makes the same corruptions.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try them, and print what was noticed."""
    screen = Screen(as_json=as_json)
    journals = [_read(path) for path in files] if files else list(recorded(1))
    table = []
    screen.line(f"{'':26} {'made':>7} {'by hash':>8} {' '.join(f'{each:>13}' for each in Fate)}")
    for tried in attempts(journals, count, seed):
        _row(screen, tried)
        table.append(tried)
    fates = sum((tried.fates for tried in table), Counter[Fate]())
    wrong = tuple(each for tried in table for each in tried.wrong)
    total = Tried("all", fates, sum(tried.by_hash for tried in table), wrong)
    _row(screen, total)
    for each in wrong:
        screen.line(f"holds, and should not: {each}")
    good = not wrong and total.by_hash == total.made
    screen.result({"good": good, "kinds": [_as_json(tried) for tried in (*table, total)], "wrong": wrong})
    raise typer.Exit(EXIT_OK if good else EXIT_NO)


def _read(path: Path) -> Recorded:
    try:
        verify_file(path)
    except AuditError as error:
        raise ConfigError(f"audit: {error}; give one that holds") from None
    lines = path.read_bytes().splitlines()
    if len(lines) < _LINES_MIN:
        raise ConfigError(f"audit: {path}: has {len(lines)} lines, too few to corrupt; give a longer one")
    return Recorded(path.name, lines)


_LINES_MIN = 10


def _row(screen: Screen, tried: Tried) -> None:
    counts = " ".join(f"{tried.fates[each]:13}" for each in Fate)
    screen.line(f"{tried.kind:26} {tried.made:7} {tried.by_hash:8} {counts}")


def _as_json(tried: Tried) -> dict[str, Json]:
    return {
        "kind": tried.kind,
        "made": tried.made,
        "rejected_by_hash": tried.by_hash,
        **{each.name.lower(): tried.fates[each] for each in Fate},
    }
