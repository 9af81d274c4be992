"""Choosers: a run is its choices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitfsm.sim.choices import (
    CalmChooser,
    Choice,
    Chooser,
    DivergedError,
    DrawnChooser,
    Recorder,
    ReplayChooser,
    ScriptedChooser,
    SeededChooser,
    between,
    every_run,
)
from refitfsm.sim.chosen import ChosenFaults
from refitfsm.sim.faults import Kind


def _play(chooser: Chooser) -> tuple[int, ...]:
    """A run whose later questions depend on earlier answers."""
    first = chooser.choose("first", 3)
    if first == 2:
        return (first,)
    return (first, *(chooser.choose(f"next {number}", 2) for number in range(first + 1)))


def _replay(record: list[Choice]) -> None:
    chooser = ReplayChooser(record)
    _play(chooser)
    chooser.finish()


def _another_each_time() -> None:
    for number, chooser in enumerate(every_run()):
        chooser.choose(f"run {number}", 2)


@pytest.mark.parametrize("seed", range(20))
def test_a_recorded_run_is_replayed(seed: int) -> None:
    """The record of a run makes the same run again, and uses all of itself."""
    recorder = Recorder(SeededChooser(seed))
    played = _play(recorder)
    again = ReplayChooser(recorder.taken)
    assert _play(again) == played
    again.finish()
    assert _play(ScriptedChooser(recorder.script())) == played


@pytest.mark.parametrize(
    "record",
    [
        [Choice("another", 3, 0)],
        [Choice("first", 4, 0)],
        [Choice("first", 3, 0)],
        [Choice("first", 3, 2), Choice("next 0", 2, 0)],
    ],
    ids=["another question", "other options", "too short", "too long"],
)
def test_a_replay_that_diverges_fails(record: list[Choice]) -> None:
    """Another question, other options, a record too short and one too long are all found."""
    with pytest.raises(DivergedError, match="choice"):
        _replay(record)


def test_what_a_script_leaves_out_is_calm() -> None:
    """What is left means the same, numbers too high are the highest there is, and all else is calm."""
    assert _play(ScriptedChooser({"next 1": 9, "first": 1})) == (1, 0, 1)
    assert _play(ScriptedChooser({"next 1": 1})) == (0, 0)
    assert _play(ScriptedChooser({})) == _play(CalmChooser())


def test_a_question_that_comes_again_is_another() -> None:
    """Answers are by how often a question was asked, too."""
    recorder = Recorder(ReplayChooser([Choice("same", 3, picked) for picked in (0, 2, 1)]))
    asked = [recorder.choose("same", 3) for _ in range(3)]
    chooser = ScriptedChooser(recorder.script())
    assert recorder.script() == {"same #2": 2, "same #3": 1}
    assert [chooser.choose("same", 3) for _ in range(3)] == asked


def test_every_run_is_met_once_and_the_calm_one_first() -> None:
    """Enumeration goes through each run that there is, once."""
    runs = [_play(chooser) for chooser in every_run()]
    assert runs == [(0, 0), (0, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (2,)]


def test_enumeration_says_when_there_is_too_much_or_a_run_changes() -> None:
    """A bound on runs holds, and a run that asks otherwise the second time is found."""
    with pytest.raises(ValueError, match="more than 6"):
        list(map(_play, every_run(runs_max=6)))
    with pytest.raises(DivergedError):
        _another_each_time()


@given(st.data())
def test_drawn_numbers_are_in_range(data: st.DataObject) -> None:
    """What Hypothesis draws is an option, and a span stays between its ends."""
    chooser = DrawnChooser(lambda low, high: data.draw(st.integers(low, high)))
    assert _play(chooser) in {_play(every) for every in every_run()}
    assert 1.0 <= between(chooser, "span", 1.0, 3.0) <= 3.0


def test_every_kind_of_fault_can_be_chosen_and_calm_is_option_0() -> None:
    """Faults are a matter of choice alone: each kind can come, and the calm chooser brings none."""
    met = {ChosenFaults(chooser, list(Kind), every=2).draw("/flush_cache") for chooser in every_run()}
    assert {fault.kind for fault in met if fault is not None} == set(Kind)
    calm = Recorder(CalmChooser())
    assert ChosenFaults(calm, list(Kind), every=2).draw("/flush_cache") is None
    assert len(calm.taken) == 1


def test_faults_that_are_off_ask_nothing() -> None:
    """After the faults are over, the chooser is not asked about them."""
    recorder = Recorder(SeededChooser(0))
    faults = ChosenFaults(recorder, list(Kind), every=2)
    faults.on = False
    assert {faults.draw("/flush_cache") for _ in range(20)} == {None}
    assert not recorder.taken
