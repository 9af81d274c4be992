"""Lives: every law can be broken, a seed is its choices, and what broke once is kept."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitfsm import ConfigError, policies
from refitfsm.sim.choices import (
    Chooser,
    DrawnChooser,
    Recorder,
    ScriptedChooser,
    SeededChooser,
    every_run,
)
from refitfsm.sim.judged import LAWS
from refitfsm.sim.laws import wrong_answer
from refitfsm.sim.life import play
from refitfsm.sim.planted import controls_of
from refitfsm.sim.played import Settings
from refitfsm.sim.requests import Answer, TokenSpan
from refitfsm.sim.seeds import Stored, dumps, load, replay, stored
from refitfsm.sim.shrink import shrink
from refitfsm.sim.swarm import SEEN, Lives, drawn

FOLDER = Path(__file__).parents[2] / "simulations" / "seeds"
FILES = sorted(FOLDER.glob("*.toml"))


def wrong(law: str, *faults: str, planted: str = "", policy: str = "always_on", cycles: int = 2) -> Stored:
    """A life of one server that something is wrong with."""
    given = {"s0": faults} if faults else {}
    return Stored(law=law, shows="", planted=planted, policy=policy, cycles=cycles, faults=given)


PUSH = "/update_weights_from_tensor"
BREAKING = (
    wrong("no_answer_from_undefined_or_torn_weights", f"lie@{PUSH}:1"),
    wrong("no_answer_from_a_stale_cache", "lie@/flush_cache:1", "lie@/flush_cache:2"),
    wrong("belief_is_true", planted="pushes part of the model"),
    wrong("no_call_kills", planted="resumes everything, also what was never released", policy="kv_only"),
    wrong(
        "whoever_meets_no_fault_stays_usable",
        planted="resumes everything, also what was never released",
        policy="kv_only",
    ),
    wrong("a_cycle_ends_in_time", "hang-before@/flush_cache:1", planted="waits for ever"),
    wrong("laws_of_the_model", planted="never ends a session"),
    wrong("a_journal_holds", planted="pushes and goes on without a flush"),
    wrong("a_fleet_heals", planted="forgets to go on", policy="colocated"),
)
"""What breaks each law of a life, but for two that are about single answers."""
OF_ANSWERS = {
    "no_answer_from_mixed_versions": ("refitfsm:run:1", ("one", "two")),
    "no_answer_under_another_versions_label": ("refitfsm:run:2", ("one",)),
}


@pytest.mark.parametrize("what", BREAKING, ids=lambda what: what.law)
def test_a_law_can_be_broken(what: Stored) -> None:
    """A server that lies, or a planner that is wrong on purpose, is found by the law that it breaks."""
    assert what.law in replay(what).laws


@pytest.mark.parametrize("law", OF_ANSWERS)
def test_a_law_of_answers_can_be_broken(law: str) -> None:
    """An answer that two versions made, and one that another version made than its label says."""
    label, makers = OF_ANSWERS[law]
    spans = tuple(TokenSpan(maker, at, at + 1) for at, maker in enumerate(makers))
    answer = Answer("r", (1,), (5,) * len(spans), spans, (), label, aborted=False, incarnation=1)
    found = wrong_answer([answer], {1: "one", 2: "two"}, "run")
    assert found is not None
    assert found.startswith(f"{law}: ")


def test_no_law_is_left_out() -> None:
    """Of every law it is known what breaks it."""
    assert {what.law for what in BREAKING} | set(OF_ANSWERS) == set(LAWS)


@pytest.mark.parametrize("seed", range(3))
def test_a_life_is_its_choices(seed: int) -> None:
    """The script of what was not calm in a life plays the same life again, to the byte."""
    chooser = SeededChooser(seed)
    drawing = drawn(Lives(policies.load("colocated"), 2, 2), chooser)
    recorder = Recorder(chooser)
    played = play(drawing, recorder)
    assert play(drawing, ScriptedChooser(recorder.script())) == played


def test_what_breaks_a_law_is_made_short() -> None:
    """Of a life of two servers with many faults one fault remains, and it breaks the same law."""
    controls = controls_of("releases what is released")
    drawing = Settings(policies.load("colocated"), 2, 3, SEEN, 8, controls=controls)
    recorder = Recorder(SeededChooser(0))
    law = play(drawing, recorder).laws[0]
    shrunk = shrink(drawing, recorder.script(), law)
    assert law in shrunk.played.laws
    assert (shrunk.settings.servers, shrunk.settings.cycles, len(shrunk.played.befallen)) == (1, 1, 1)
    with pytest.raises(ValueError, match="does not break it"):
        shrink(drawing._replace(kinds=()), {}, law)
    kept = stored(shrunk, law, "colocated", "releases what is released")
    assert replay(kept).script == shrunk.played.script


class OneFault:
    """Asks another chooser which fault there is, and about none after the first; calm otherwise."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._struck = False

    def choose(self, label: str, options: int) -> int:
        if label.endswith(" kind"):
            return self._chooser.choose(label, options)
        if self._struck or not label.endswith(" fault"):
            return 0
        picked = self._chooser.choose(label, options)
        self._struck = picked == 1
        return picked


def test_no_single_fault_breaks_a_law() -> None:
    """Each kind of fault at each call of a cycle, one at a time: all of them, through the real driver."""
    one = Settings(policies.load("colocated"), 1, 1, SEEN, every=2)
    lives = [play(one, OneFault(chooser)) for chooser in every_run(runs_max=1000)]
    assert [played.broken for played in lives if played.broken] == []
    befallen = {fault for played in lives for _, fault in played.befallen}
    assert len(lives) == len(befallen) + 1
    assert {fault.kind for fault in befallen} == set(SEEN)


@settings(max_examples=15)
@given(st.data())
def test_hypothesis_finds_no_life_that_breaks_a_law(data: st.DataObject) -> None:
    """Whatever is drawn for two servers and a cycle: no law is broken."""
    chooser = DrawnChooser(lambda low, high: data.draw(st.integers(low, high)))
    played = play(Settings(policies.load("colocated"), 2, 1, SEEN, every=20), chooser)
    assert played.broken == ()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_broke_once_holds(path: Path) -> None:
    """The law of a stored life holds now, and breaks with what is planted in it."""
    what = load(path)
    now = replay(what, planted=False)
    assert now.broken == ()
    assert len(now.befallen) == sum(map(len, what.faults.values())), "a fault of the file befell no call"
    if what.planted:
        assert what.law in replay(what).laws


def test_a_file_says_what_it_was_made_of(tmp_path: Path) -> None:
    """What is written is read again; what is no life is refused in one line."""
    what = wrong("belief_is_true", "kill@/flush_cache:2", planted='says "no"')
    file = tmp_path / "life.toml"
    file.write_text(dumps(what))
    assert load(file) == what
    for text, why in (
        ('law = "no_law"\nshows = ""', "no_law"),
        ('law = "belief_is_true"\nshows = ""\nfault = 1', "fault"),
        ("law =", "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            load(file)
    with pytest.raises(ConfigError, match="is no planner"):
        replay(what)
    with pytest.raises(ConfigError, match="none that is picked"):
        replay(wrong("belief_is_true", "kill@/flush_cache:2+"))
