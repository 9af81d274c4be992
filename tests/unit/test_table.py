"""The table, the planner's judge and the `transitions` machine are the same rules."""

import itertools

import pytest

from refitfsm.machine import Referee
from refitfsm.model.effects import EFFECTS
from refitfsm.model.guards import GUARDS, Guard
from refitfsm.model.states import Condition, ServerState
from refitfsm.model.table import BOOK, ROWS, TABLE, Row, Verdict
from refitfsm.model.values import Command, CommandKind, Event, EventName, Facts, ServerView
from refitfsm.planner.judge import judge

VALUATION: dict[str, bool] = {}
FORCED = {
    name: Guard(name, lambda _v, _e, _f, name=name: VALUATION[name], guard.remedy)
    for name, guard in GUARDS.items()
}
FORCED_BOOK = BOOK._replace(guards=FORCED)
CELLS = list(itertools.product(ServerState, EventName))


def first_that_holds(state: ServerState, event: EventName) -> Row | None:
    """The rules read naively, from the list in which they are written."""
    for row in ROWS:
        if (row.source, row.event) == (state, event) and all(VALUATION[name] for name in row.guards):
            return row
    return None


def valuations(state: ServerState, event: EventName) -> list[dict[str, bool]]:
    names = sorted({name for row in TABLE[state, event] for name in row.guards})
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product((False, True), repeat=len(names))
    ]


@pytest.fixture(scope="module")
def referee() -> Referee:
    return Referee(FORCED_BOOK)


@pytest.mark.parametrize(("state", "event"), CELLS)
def test_planner_table_and_machine_agree_on_every_valuation(
    state: ServerState, event: EventName, referee: Referee
) -> None:
    """Planner, table and machine take the same row for every (state, event, guard valuation)."""
    view = ServerView("s", state=state)
    happening = Event(event, Command(CommandKind.ENROL))
    for valuation in valuations(state, event):
        VALUATION.clear()
        VALUATION.update(valuation)
        expected = first_that_holds(state, event)
        judged = judge(view, happening, Facts(), FORCED_BOOK)
        row, ended = referee.judge(view, happening, Facts())
        if expected is None or expected.verdict is Verdict.REFUSE:
            assert judged.verdict is Verdict.REFUSE
            assert judged.rule
            assert judged.remedy
            assert row is None
            assert ended is state
        else:
            assert judged.row is expected is row
            assert ended is (expected.destination or state)


def test_the_machine_has_no_edge_that_is_not_in_the_table(referee: Referee) -> None:
    """The machine holds exactly the table's rows: no automatic transition, none lost."""
    transitions = [
        transition
        for event in referee.machine.events.values()
        for rows in event.transitions.values()
        for transition in rows
    ]
    assert len(transitions) == sum(row.verdict is not Verdict.REFUSE for row in ROWS)


def test_no_effect_makes_a_suspect_trusted() -> None:
    """What a suspect did last stays unknown, whatever happens, until its process is another."""
    view = ServerView("s", condition=Condition.SUSPECT)
    event = Event(EventName.VERIFIED, Command(CommandKind.ENROL), detail="why")
    cleared = {
        name for name, act in EFFECTS.items() if act(view, event, Facts()).condition is not view.condition
    }
    assert cleared == {"note_enrolment", "take_offline"}


def test_every_state_can_be_left_and_reached() -> None:
    """No state is a dead end, and none is out of reach."""
    edges = {(row.source, row.destination) for row in ROWS if row.destination}
    for state in ServerState:
        assert any(source is state and destination is not state for source, destination in edges)
        assert any(destination is state and source is not state for source, destination in edges)


def test_released_never_leads_straight_to_serving() -> None:
    """There is no edge from released to serving, and only the commit's answer leads from rebuilt to it."""
    into_serving = {
        (row.source, row.event)
        for row in ROWS
        if row.destination is ServerState.SERVING and row.source is not ServerState.SERVING
    }
    assert into_serving == {
        (ServerState.OFFLINE, EventName.ENROLLED),
        (ServerState.KV_REBUILT, EventName.CONTINUED),
    }
