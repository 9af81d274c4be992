"""Planners that are wrong on purpose are found, each within its bounds and in nothing smaller."""

import re
from collections import Counter
from collections.abc import Callable

import pytest

from refitfsm.check.planted.catalogue import MISTAKES, canary
from refitfsm.check.planted.mistake import KINDS, NOT_OF_A_PLANNER, Bounds, Mistake, look, look_at_the_sound
from refitfsm.check.script import script


def named(mistake: Mistake) -> str:
    return mistake.name


@pytest.mark.parametrize("mistake", MISTAKES, ids=named)
def test_what_is_planted_is_found(mistake: Mistake) -> None:
    """The search comes upon the mistake, and shows the way; the planner that ships does not make it there."""
    found = look(mistake)
    assert found.broken is not None
    lines = list(script(found.broken))
    assert len(lines) == len(found.broken.trace) + 1
    sound = look_at_the_sound(mistake.bounds, states_max=2 * found.states)
    assert sound.broken is None or sound.broken.law.startswith("the_planner_asks_only")


def fewer(field: str, least: int) -> Callable[[Bounds], Bounds | None]:
    def smaller(bounds: Bounds) -> Bounds | None:
        now = getattr(bounds, field)
        return bounds._replace(**{field: now - 1}) if now > least else None

    return smaller


@pytest.mark.parametrize("smaller", [fewer("servers", 1), fewer("faults", 0)], ids=["servers", "faults"])
def test_the_bounds_are_the_smallest(smaller: Callable[[Bounds], Bounds | None]) -> None:
    """With a server or a fault less, the mistake does not show anywhere."""
    needless = []
    for mistake in MISTAKES:
        bounds = smaller(mistake.bounds)
        if bounds is None:
            continue
        found = look(mistake._replace(bounds=bounds))
        if found.broken is not None or not found.complete:
            needless.append((mistake.name, found.broken and found.broken.law))
    assert needless == []


def test_every_kind_of_report_has_two() -> None:
    """Of each kind that a planner can commit there are at least two, and at least 25 in all."""
    counts = Counter(mistake.kind for mistake in MISTAKES)
    assert {kind for kind, count in counts.items() if count >= 2} == {
        kind for _, kind in KINDS
    } - NOT_OF_A_PLANNER
    assert len(MISTAKES) >= 25


def test_mistakes_are_told_apart() -> None:
    """Each has a name of its own, a sentence, and reports by their numbers."""
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    for mistake in MISTAKES:
        assert mistake.says.endswith("."), mistake.name
        assert all(re.fullmatch(r"F\d\d\d?", report) for report in mistake.reports), mistake.name


def test_any_mistake_may_be_the_canary() -> None:
    """The same text gives the same mistake, and other texts give all of the others."""
    drawn = [canary(f"commit {number}") for number in range(2000)]
    assert drawn == [canary(f"commit {number}") for number in range(2000)]
    assert {mistake.name for mistake in drawn} == {mistake.name for mistake in MISTAKES}
