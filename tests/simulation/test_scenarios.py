"""Scenarios do what they claim, and a claim that is not so is found."""

from pathlib import Path

import pytest

from refitfsm import ConfigError
from refitfsm.check.planted.mistake import KINDS
from refitfsm.sim.scenario import load, loads
from refitfsm.sim.scenario_play import tell
from refitfsm.sim.scenario_sights import LAWS, Wanted
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


HARM = {*LAWS, "call_has_no_answer", "paused_at_the_end", "server_dies", "trainer_has_no_room"}
"""What a client comes to."""
MIXED = "answer_is_made"
"""Where servers answer by different versions, that is the harm."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_holds(path: Path) -> None:
    """What must be seen is seen, what must not be is not; one that is marked open does not pass."""
    assert told(path).wrong == ()


@pytest.mark.parametrize(
    "path", [path for path in FILES if load(path).by_hand is not None], ids=lambda path: path.stem
)
def test_by_hand_it_goes_wrong(path: Path) -> None:
    """A client without refitfsm comes to harm by what a fleet is to come through."""
    by_hand, claims = told(path).by_hand, told(path).scenario.by_hand
    assert by_hand is not None
    assert claims is not None
    claimed = {Wanted.of(written).name for written in claims.sometimes}
    assert claimed & (HARM | {MIXED})
    if not claimed & HARM:
        made = {sight.words for sight in by_hand.seen if sight.name == MIXED}
        assert len({words.split()[1] for words in made}) > 1


def test_every_case_defect_and_kind_of_report_is_played() -> None:
    """A1 to A10, B1 to B5 and at least 25 reports, of each kind one that holds."""
    scenarios = [told(path).scenario for path in FILES]
    ids = {each for scenario in scenarios for each in scenario.ids}
    assert {f"A{number}" for number in range(1, 11)} | {f"B{number}" for number in range(1, 6)} <= ids
    reports = {each for each in ids if each.startswith("F")}
    assert len(reports) >= 25
    held = {each for scenario in scenarios if not scenario.open for each in scenario.ids if each in reports}
    kinds = {next(kind for last, kind in KINDS if int(each[1:]) <= last) for each in held}
    assert kinds == {kind for _, kind in KINDS}


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


def test_what_is_called_unavoidable_has_to_be_seen() -> None:
    """No law is set aside for nothing."""
    text = '[fleet]\nsteps = [{ do = "connect" }]\nnever = ["server_dies"]\nunavoidable = ["belief_is_false"]'
    assert wrong(text) == ("is called unavoidable and was not seen: belief_is_false",)


def test_a_step_by_hand_that_cannot_be_done_is_an_error() -> None:
    """A server that lives cannot be started anew: the scenario is wrong, and says so."""
    text = '[by_hand]\nsteps = [{ do = "restart", server = "s0" }]\nnever = ["server_dies"]'
    assert "odd_error" in wrong(text)[0]


def test_a_policy_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    """A path of a policy is seen from the scenario that names it."""
    (tmp_path / "mine.toml").write_text('description = "Mine."')
    (tmp_path / "one").mkdir()
    file = tmp_path / "one" / "plain.toml"
    fleet = '[fleet]\nsteps = [{ do = "connect" }, { do = "refit" }]\nsometimes = ["version_is_served: 1"]'
    file.write_text(PLAIN + 'policy = "../mine.toml"\n' + fleet)
    assert tell(load(file)).wrong == ()


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
        (
            '[by_hand]\nsteps = [{ do = "take", gpu = "x", nbytes = 1 }]\nnever = ["server_dies"]',
            "no GPU 'x'",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_sentence(text: str, why: str) -> None:
    """Nothing is guessed: what is not known is an error that says what is."""
    with pytest.raises(ConfigError, match=why):
        loads(PLAIN + text)
