"""What scenarios say must never be seen can be seen: by wrong planners, by hand, and where one is open."""

import functools
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain

import pytest

from refitfsm.check.planted.catalogue import MISTAKES
from refitfsm.check.planted.mistake import Mistake, wrong_world
from refitfsm.controller import Controller
from refitfsm.model.fleet import FleetView
from refitfsm.model.rules import Rules
from refitfsm.planner.cycle import Decision, Input, decide
from refitfsm.planner.requests import Request
from refitfsm.sim.scenario import loads
from refitfsm.sim.scenario_play import Played, play
from refitfsm.sim.scenario_sights import LAWS, Sight, Wanted
from tests.support.scenarios import FILES, GROUP, told

pytestmark = pytest.mark.xdist_group(GROUP)

UNSEEN = {
    "takes a late answer for the one it waits for": "the real controller cancels a call whose time is up",
    "asks the dead without end": "a cycle's time is up before it does harm",
}
"""Mistakes that the exhaustive search alone finds, and why no scenario does."""


def wrong_controls(mistake: Mistake) -> Callable[..., Controller]:
    """Makes controllers that make the mistake."""
    world = wrong_world(mistake)
    return functools.partial(Controller, planner=world.decide, book=world.book)


@cache
def played_wrongly(mistake: Mistake) -> Played | None:
    """The first scenario of the same reports that finds the mistake.

    What the auditor says does not count: the journal of a planner with other rules never holds.
    """
    for scenario in (told(path).scenario for path in FILES):
        if scenario.fleet is None or scenario.open or not set(scenario.ids) & set(mistake.reports):
            continue
        played = play(scenario, scenario.fleet, wrong_controls(mistake))
        if any("journal_does_not_hold" not in words for words in played.wrong):
            return played
    return None


def seen_anywhere() -> Iterator[Sight]:
    """Whatever was seen by hand, through a fleet, and through one that makes a mistake."""
    wrongly = (played for mistake in MISTAKES if (played := played_wrongly(mistake)) is not None)
    rightly = (played for path in FILES for played in (told(path).by_hand, told(path).fleet) if played)
    return (sight for played in chain(rightly, wrongly) for sight in played.seen)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planner_that_is_wrong_on_purpose_is_found(mistake: Mistake) -> None:
    """Each makes a scenario of its own reports fail, which the planner that ships passes."""
    assert (played_wrongly(mistake) is None) is (mistake.name in UNSEEN)


def test_each_law_can_be_broken() -> None:
    """By hand, by a wrong planner, or by a fleet whose scenario is open: each is seen."""
    seen = {sight.name for sight in seen_anywhere()}
    planted = {"odd_error", "something_never_ends"}  # by the tests below
    assert set(LAWS) - seen <= planted


def test_what_must_never_be_seen_is_written_as_it_would_be() -> None:
    """Each `never` matches something that is seen in another play: none is idle for a slip of the pen."""
    seen = tuple(seen_anywhere())
    fleets = [play for path in FILES if (play := told(path).scenario.fleet) is not None]
    written = {never for play in fleets for never in play.never} - set(LAWS)
    assert [never for never in sorted(written) if Wanted.of(never).first(seen) is None] == []


PLAIN = """
name = "plain"
ids = ["X1"]
shows = "Nothing in particular."
[servers]
count = 1
[fleet]
faults = { s0 = ["hang-before@pause:1"] }
steps = [{ do = "connect" }, { do = "refit" }]
never = ["server_dies"]
"""


def wrong_of(decides: Callable[..., Decision]) -> str:
    """What a scenario with a pause that hangs says of a planner."""
    scenario = loads(PLAIN)
    assert scenario.fleet is not None
    played = play(scenario, scenario.fleet, functools.partial(Controller, planner=decides))
    return "; ".join(played.wrong)


def test_a_call_without_end_is_found() -> None:
    """A planner that does nothing after the enrolment leaves its caller waiting, and that is seen."""

    def deaf(fleet: FleetView, given: Input, now_s: float, rules: Rules) -> Decision:
        enrolled = fleet.last_cycle > 1
        return (
            Decision(fleet)
            if enrolled and not isinstance(given, Request)
            else decide(fleet, given, now_s, rules)
        )

    assert "something_never_ends" in wrong_of(deaf)


def test_an_error_that_is_none_of_ours_is_found() -> None:
    """A planner that raises ends its caller's call with that, and that is seen."""

    def raises(*_: object) -> Decision:
        raise ZeroDivisionError

    assert "odd_error" in wrong_of(raises)
