"""Hypothesis plays a planner's fleet, too: it finds mutants, and nothing in the rules that ship."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from refitfsm import policies
from refitfsm.check.moves import FAULTS
from refitfsm.check.mutants.games import planned_game
from refitfsm.check.mutants.rules import mutants
from refitfsm.check.worlds import worlds
from refitfsm.model.values import CommandKind
from refitfsm.testing.machine import LABELS, LawBroken, player

GAME = planned_game("always_on", next(worlds(policies.load("always_on").rules)), 1, 2)
ALL = {mutant.name: mutant for mutant in mutants()}
FOUND = (
    "row redirected: offline/enrol/0: serving",
    "row dropped: serving/drain/0",
    "guard negated: serving/drain/0: server_is_trusted",
    "effect dropped: serving/pause/0: note_command",
    "guard negated: serving/flush/0: server_is_paused",
    "row redirected: serving/flush/0: kv_rebuilt",
    "guard removed: offline/enrolled/0: answer_is_expected",
    "effect dropped: offline/enrolled/0: note_enrolment",
    "row dropped: serving/drained/0",
    "effect dropped: serving/drained/0: settle",
    "effect dropped: serving/paused/0: note_pause",
    "effect dropped: serving/flushed/0: empty_cache",
)
SETTINGS = settings(
    max_examples=40,
    stateful_step_count=15,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)


@pytest.mark.parametrize("name", FOUND)
def test_a_mutant_is_found(name: str) -> None:
    """Hypothesis comes upon the law that the change breaks."""
    with pytest.raises(LawBroken):
        run_state_machine_as_test(player(GAME, ALL[name].rule.book), settings=SETTINGS)  # type: ignore[no-untyped-call]


def test_the_rules_that_ship_break_nothing() -> None:
    """The same walks break no law under the table that ships."""
    run_state_machine_as_test(player(GAME), settings=SETTINGS)  # type: ignore[no-untyped-call]


def test_each_fault_and_request_has_a_rule() -> None:
    """The state machine has one rule for each kind of command and of fault, and one for the rest."""
    rules = player(GAME)
    assert all(hasattr(rules, name.replace(" ", "_")) for name in LABELS)
    assert len(set(LABELS)) == len(CommandKind) + len(FAULTS) + 1
