"""Outcomes of checks and of random sequences for people, as they come, and as plain data."""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from refitfsm.sim.conformance.differential import Played
from refitfsm.sim.conformance.runner import Outcome, Verdict


async def shown(outcomes: AsyncIterator[Outcome]) -> list[Outcome]:
    """Print a line for each as it comes."""
    found = []
    async for outcome in outcomes:
        found.append(outcome)
        check = outcome.check
        line = f"{outcome.verdict:4} {outcome.seconds:7.3f} s  {check.area:10} {check.name}"
        _say(f"{line}: {outcome.reason}" if outcome.reason else line)
    return found


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


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


async def compared(played: AsyncIterator[Played]) -> list[Played]:
    """Print a line for each sequence that differs as it comes."""
    found = []
    async for each in played:
        found.append(each)
        difference = each.difference
        if difference is not None:
            calls = ", ".join(difference.calls)
            _say(f"sequence {each.sequence.number} differs: {calls}")
            _say(f"    the simulator: {difference.simulated}")
            _say(f"    the server:    {difference.real}")
    return found


def all_alike(played: Sequence[Played]) -> bool:
    """Whether no sequence differs."""
    return all(each.difference is None for each in played)


def comparison(played: Sequence[Played]) -> dict[str, object]:
    """What was compared, and every sequence, as plain data."""
    return {
        "sequences": len(played),
        "calls": sum(min(len(each.said), len(each.sequence.calls)) for each in played),
        "deaths": sum(each.sequence.kills for each in played),
        "differences": sum(each.difference is not None for each in played),
        "played": [_as_row(each) for each in played],
    }


def _as_row(played: Played) -> dict[str, object]:
    row: dict[str, object] = {
        "number": played.sequence.number,
        "calls": [call.name for call in played.sequence.calls],
        "said": list(played.said),
    }
    return row if played.difference is None else row | {"difference": played.difference._asdict()}


def comparison_summary(played: Sequence[Played]) -> str:
    """How many there were, in a line."""
    found = comparison(played)
    return (
        f"{found['sequences']} sequences of {found['calls']} calls, {found['deaths']} deaths,"
        f" {found['differences']} differences"
    )
