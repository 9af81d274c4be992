"""What the shipped strategies and profiles make."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from refitfsm import ConfigError, policies
from refitfsm.model import laws
from refitfsm.model.fleet import FleetView
from refitfsm.model.row import Verdict
from refitfsm.model.states import Condition, ServerState
from refitfsm.model.values import REQUESTS, CommandKind, Event, EventName, ServerView
from refitfsm.planner.judge import judge
from refitfsm.sim.faults import parse_fault
from refitfsm.testing import machine, profiles, strategies
from tests.tidy.tree import ROOT

SOME = settings(max_examples=50)


@SOME
@given(strategies.servers())
def test_servers_keep_the_laws(view: ServerView) -> None:
    """No belief that is made breaks a law of views."""
    assert laws.broken((view,), strategies.FACTS) is None


@SOME
@given(st.sampled_from(tuple(ServerState)).flatmap(strategies.servers))
def test_each_state_has_servers(view: ServerView) -> None:
    """A server is idle, in whatever state was asked for."""
    assert view.pending is None


@SOME
@given(strategies.commands(CommandKind.PUSH))
def test_commands_are_of_the_kind_that_is_asked(command: object) -> None:
    """A kind makes commands of that kind alone."""
    assert getattr(command, "kind", None) is CommandKind.PUSH


@pytest.mark.parametrize("verdict", [Verdict.TAKE, Verdict.REFUSE])
def test_some_requests_are_taken_and_some_are_not(verdict: Verdict) -> None:
    """Steps reach either side of the guards of a release."""

    def is_judged_so(step: tuple[ServerView, Event]) -> bool:
        return judge(*step, strategies.FACTS).verdict is verdict

    view, event = find(strategies.steps(ServerState.SERVING, EventName.RELEASE), is_judged_so)
    assert view.state is ServerState.SERVING
    assert event.name in REQUESTS


@SOME
@given(strategies.faults())
def test_faults_are_those_of_simulated_servers(spec: str) -> None:
    """Each is a fault that a simulated server takes."""
    assert parse_fault(spec).first >= 1


@SOME
@given(strategies.policies())
def test_policies_are_those_that_ship(named: policies.NamedPolicy) -> None:
    """Each has the name of a file."""
    assert named.name in policies.shipped()


def test_fleets_go_far() -> None:
    """Fleets that serve are among them, and such as have a suspect."""
    few = settings(max_examples=500, derandomize=True, phases=(Phase.generate,))
    fleets = strategies.fleets("always_on", servers=1, faults=1)

    def is_suspect(fleet: FleetView) -> bool:
        return any(view.condition is Condition.SUSPECT for view in fleet.servers.values())

    def serves(fleet: FleetView) -> bool:
        return all(view.state is ServerState.SERVING for view in fleet.servers.values())

    assert is_suspect(find(fleets, is_suspect, settings=few))
    assert serves(find(fleets, serves, settings=few))


@pytest.mark.parametrize("sessions", [True, False])
def test_a_machine_plays_a_policy_by_name(sessions: bool) -> None:
    """Under a shipped policy no law is broken, with sessions and without."""
    few = settings(
        max_examples=5, stateful_step_count=20, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine("colocated", servers=1, sessions=sessions), settings=few)  # type: ignore[no-untyped-call]


def test_a_machine_needs_a_policy_and_a_server() -> None:
    """What cannot be played is said at once."""
    with pytest.raises(ConfigError, match="there is none"):
        machine("no-such-policy")
    with pytest.raises(ConfigError, match="at least one server"):
        machine("colocated", servers=0)


SAYS = """
from hypothesis import settings
from refitfsm.testing import load_profile
print(load_profile(), settings().max_examples)
"""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "dev 100"),
        ({"CI": "1"}, "ci 100"),
        ({"CI": "1", profiles.VARIABLE: "nightly"}, "nightly 2000"),
    ],
)
def test_the_environment_chooses_the_profile(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    """The variable first, then whether it is CI."""
    command = [sys.executable, "-c", SAYS]
    environment = {"PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said
