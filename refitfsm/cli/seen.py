"""What a search has met and what it has not: rows, turns, faults, and how often each law was at risk."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from refitfsm.check.laws import LAWS_OF_TRUTH
from refitfsm.check.moves import FAULTS, UNNOTICED
from refitfsm.check.questions import FAULTS as FAULTS_OF_ALL
from refitfsm.check.search import ASKS, ENDS, HEALS, KILLS, LATE, Seen
from refitfsm.cli.show import Json
from refitfsm.model.laws import LAWS
from refitfsm.model.records import Turn
from refitfsm.model.row import Verdict
from refitfsm.model.table import ROWS

SOMETIMES: Final[Mapping[str, tuple[str, ...]]] = {
    "rows": tuple(row.id for row in ROWS if row.verdict is Verdict.TAKE),
    "turns": tuple(turn.value for turn in Turn),
    "faults": tuple(sorted({*(fault.name for fault in FAULTS), *UNNOTICED, *FAULTS_OF_ALL})),
    "risks": (
        *(law.name for law in LAWS),
        *(law.name for law in LAWS_OF_TRUTH),
        KILLS,
        ASKS,
        LATE,
        ENDS,
        HEALS,
    ),
}
"""What must be met at some time. A search that does not meet it says nothing of it.

Rows that refuse a request are for callers: a planner that asks for what is refused breaks a law.
"""


def _met(seen: Seen) -> Mapping[str, Counter[str]]:
    return {"rows": seen.rows, "turns": seen.turns, "faults": seen.faults, "risks": seen.risks}


def never(seen: Seen) -> dict[str, list[str]]:
    """What was not met, by its kind."""
    met = _met(seen)
    return {kind: [each for each in names if not met[kind][each]] for kind, names in SOMETIMES.items()}


def plain(seen: Seen) -> dict[str, Json]:
    """How often each was met, as plain data."""
    met = _met(seen)
    return {kind: {name: met[kind][name] for name in names} for kind, names in SOMETIMES.items()}


def shown(seen: Seen) -> Iterator[str]:
    """The same for people, a law a line."""
    missing = never(seen)
    for kind, what in (("rows", "rows of the table"), ("turns", "turns of a cycle"), ("faults", "faults")):
        count = len(SOMETIMES[kind])
        text = f"sometimes: {count - len(missing[kind])} of {count} {what}"
        yield text + (f"; never: {', '.join(missing[kind])}" if missing[kind] else "")
    for law in SOMETIMES["risks"]:
        count = seen.risks[law]
        yield f"{law}: " + (f"{count:,} times at risk" if count else "never at risk: not tested")
