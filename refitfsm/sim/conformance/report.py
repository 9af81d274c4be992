"""Outcomes for people, as they come, and as plain data."""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from refitfsm.sim.conformance.runner import Outcome, Verdict


async def shown(outcomes: AsyncIterator[Outcome]) -> list[Outcome]:
    """Print a line for each as it comes."""
    found = []
    async for outcome in outcomes:
        found.append(outcome)
        check = outcome.check
        line = f"{outcome.verdict:4} {outcome.seconds:7.3f} s  {check.area:10} {check.name}"
        sys.stdout.write(f"{line}: {outcome.reason}\n" if outcome.reason else f"{line}\n")
        sys.stdout.flush()
    return found


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many there are of each kind."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)


def none_failed(outcomes: Sequence[Outcome]) -> bool:
    """Whether every check that could be made passed."""
    return all(outcome.verdict is not Verdict.FAIL for outcome in outcomes)


def as_rows(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """The outcomes as plain data."""
    return [
        {
            "check": outcome.check.name,
            "law": outcome.check.law,
            "area": str(outcome.check.area),
            "lethal": outcome.check.lethal,
            "verdict": str(outcome.verdict),
            "reason": outcome.reason,
            "seconds": round(outcome.seconds, 3),
        }
        for outcome in outcomes
    ]
