"""Scenarios do what they claim, and a claim that is not so is found."""

from pathlib import Path

import pytest

from refitfsm import ConfigError
from refitfsm.sim.scenario import loads
from refitfsm.sim.scenario_play import tell
from tests.support.scenarios import FILES, GROUP, told

pytestmark = pytest.mark.xdist_group(GROUP)

PLAIN = """
name = "plain"
ids = ["X1"]
shows = "Nothing in particular."
"""


def wrong(text: str) -> tuple[str, ...]:
    """What is wrong with a scenario, given the rest of its text."""
    return tell(loads(PLAIN + text)).wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_holds(path: Path) -> None:
    """What must be seen is seen, what must not be is not; one that is marked open does not pass."""
    assert told(path).wrong == ()


def test_a_law_that_is_broken_is_found() -> None:
    """Laws need not be named: a server that lies about its release is believed, and that is seen."""
    found = wrong(
        """
        [fleet]
        faults = { s0 = ["lie@release"] }
        steps = [{ do = "connect" }, { do = "release" }]
        sometimes = ["cycle_commits"]
        """
    )
    assert any("belief_is_false: s0: resident" in words for words in found)


def test_what_never_happens_is_missed() -> None:
    """A sight that must sometimes be seen, and is not, fails the scenario."""
    steps = '[fleet]\nsteps = [{ do = "connect" }]\nsometimes = ["version_is_served: 1"]'
    assert wrong(steps) == ("was never seen: version_is_served: 1",)


def test_a_fault_that_befalls_nothing_is_an_error() -> None:
    """Whoever writes a fault means it to happen."""
    text = '[fleet]\nsteps = [{ do = "connect" }]\nfaults = { s1 = ["kill@push:3"] }\nnever = ["server_dies"]'
    assert wrong(text) == ("befell no call: the fault kill@push:3 of s1",)


def test_an_open_scenario_that_passes_is_an_error() -> None:
    """The mark is taken away once it is not so any more."""
    text = 'open = "not yet"\n[fleet]\nsteps = [{ do = "connect" }]\nnever = ["server_dies"]'
    assert len(wrong(text)) == 1
    assert "take the mark away" in wrong(text)[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[fleet]\nstep = []", "unknown field `step`"),
        ('[fleet]\nsteps = [{ do = "conect" }]', "conect"),
        ('[fleet]\nsteps = [{ do = "connect", version = 1 }]', "unknown field `version`"),
        ('[fleet]\nsteps = [{ do = "kill", server = "s7" }]\nnever = ["server_dies"]', "no server 's7'"),
        ('[fleet]\nsteps = [{ do = "connect" }]\nnever = ["server_sings"]', "nothing of that name"),
        ('[fleet]\nsteps = [{ do = "connect" }]', "claims nothing"),
        ('[fleet]\nsteps = [{ do = "wait", seconds = 1 }]\nnever = ["server_dies"]', "no step of .fleet."),
        ('[by_hand]\nsteps = [{ do = "release" }]\nnever = ["server_dies"]', "asks a fleet"),
        ('[by_hand]\nsteps = []\nnever = ["server_dies"]\nfaults = { s0 = ["x@push"] }', "no kind of fault"),
        ("", "nothing is played"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_sentence(text: str, why: str) -> None:
    """Nothing is guessed: what is not known is an error that says what is."""
    with pytest.raises(ConfigError, match=why):
        loads(PLAIN + text)
