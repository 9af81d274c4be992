"""The exhaustive search: it reaches everything, and what is wrong on purpose it finds."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from refitfsm import policies
from refitfsm.check import laws
from refitfsm.check.moves import World
from refitfsm.check.normal import Normaliser
from refitfsm.check.script import script
from refitfsm.check.search import Result, Seen, search, start, step
from refitfsm.check.worlds import worlds
from refitfsm.model.fleet import Goal
from refitfsm.model.guards import GUARDS, Guard
from refitfsm.model.states import ServerState
from refitfsm.model.table import TABLE
from refitfsm.model.values import EventName, VerifyLevel
from refitfsm.planner import program

ENOUGH = 60_000


def world(policy: str, kind: str = "sessions") -> World:
    return next(named.world for named in worlds(policies.load(policy).rules) if named.name == kind)


def found(policy: str, *, servers: int = 1, faults: int = 1, kind: str = "sessions") -> Result:
    return search(servers, faults, world(policy, kind), states_max=ENOUGH)


@pytest.mark.parametrize("policy", policies.shipped())
def test_under_a_shipped_policy_every_law_holds_in_every_state(policy: str) -> None:
    """One server, one fault, everything that can be asked, to the fixed point, for servers of every kind."""
    for named in worlds(policies.load(policy).rules):
        result = search(1, 1, named.world)
        assert result.complete
        assert result.broken is None, "\n".join(script(result.broken))


@pytest.mark.parametrize("level", VerifyLevel)
def test_under_every_proof_every_law_holds(level: VerifyLevel) -> None:
    """Whatever proof the policy asks for, the search comes to its end."""
    rules = policies.load("colocated").rules._replace(verify=level)
    for named in worlds(rules):
        alone, together = search(1, 1, named.world), search(2, 0, named.world)
        for result in (alone, together):
            assert result.complete
            assert result.broken is None, "\n".join(script(result.broken))


def test_two_servers_meet_at_the_commit() -> None:
    """With two servers and no fault there are more states than with one, and all laws hold."""
    alone, together = found("colocated", faults=0), found("colocated", servers=2, faults=0)
    assert alone.complete
    assert together.complete
    assert together.broken is None
    assert together.states > alone.states


def without(goal: Goal, step_name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        left = tuple(each for each in program.PROGRAMS[goal] if each.name != step_name)
        assert len(left) < len(program.PROGRAMS[goal])
        patch.setitem(program.PROGRAMS, goal, left)

    return plant


def row_gone(state: ServerState, event: EventName, guard: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The rows of a cell that ask for a guard are not there."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        cell = TABLE[state, event]
        left = tuple(row for row in cell if guard not in row.guards)
        assert len(left) < len(cell)
        patch.setitem(TABLE, (state, event), left)

    return plant


def always(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A guard that always holds."""
    return lambda patch: patch.setitem(
        GUARDS, name, Guard(name, lambda _view, _event, _facts: True, GUARDS[name].remedy)
    )


def both(*plants: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(patch)

    return plant


@pytest.mark.parametrize(
    ("plant", "law"),
    [
        (without(Goal.RELEASE, "pause"), "the_planner_asks_only_what_the_table_allows"),
        (without(Goal.REFIT, "verify"), "a_fleet_heals"),
        (both(without(Goal.RELEASE, "flush"), always("cache_is_empty")), "a_rebuilt_cache_is_empty"),
        (both(without(Goal.RELEASE, "pause"), always("server_is_paused")), "no_command_kills"),
        (row_gone(ServerState.SERVING, EventName.LOST, "command_moves_memory"), "no_command_kills"),
        (
            row_gone(ServerState.WEIGHTS_STAGED, EventName.REFUSED, "refusal_is_of_a_closed_session"),
            "a_fleet_heals",
        ),
        (always("answer_is_expected"), "a_late_answer_changes_nothing"),
    ],
)
def test_what_is_planted_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step left out, a guard that says yes, a row that is missing: each breaks a law, with a way there."""
    plant(monkeypatch)
    result = found("colocated")
    assert result.broken is not None
    assert result.broken.law.startswith(law)
    lines = list(script(result.broken))
    assert len(lines) == len(result.broken.trace) + 1
    assert law in lines[-1]


def test_the_way_to_a_broken_law_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each move of a trace begins where the one before it ended."""
    row_gone(ServerState.SERVING, EventName.LOST, "command_moves_memory")(monkeypatch)
    here = world("colocated")
    broken = search(1, 1, here).broken
    assert broken is not None
    normal = Normaliser()
    state, _ = normal(start(1, 1, here))
    for move, following in pairwise(broken.trace):
        after, why = step(move.state, move, here, Seen())
        assert not why
        state, _ = normal(after)
        assert state.truth == following.state.truth or following.given is not None
    _, why = step(broken.trace[-1].state, broken.trace[-1], here, Seen())
    assert why == broken.law
    assert laws.broken(state) == ""


def test_a_search_that_gives_up_says_so() -> None:
    """Where not every state was reached, the search is not complete."""
    assert not search(1, 1, world("colocated"), states_max=50).complete
