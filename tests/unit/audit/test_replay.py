"""A run is decided again from its journal: the same, or the first difference is told."""

import asyncio
import contextlib

import pytest

from refitfsm import CommandRefused, CycleAborted, policies
from refitfsm.audit.lines import GENESIS, chain, line_of
from refitfsm.errors import AuditError
from refitfsm.model.fleet import FleetView
from refitfsm.model.rules import Rules
from refitfsm.planner.cycle import Decision, Input, Tick, decide
from refitfsm.planner.playbook import PLAYBOOK
from refitfsm.planner.program import PROGRAMS
from refitfsm.replay import replay
from refitfsm.sim.config import SimConfig
from refitfsm.sim.faults import FaultPlan, parse_fault
from refitfsm.sim.loop import run
from tests.support.world import World

COLOCATED = policies.load("colocated").rules


def journal(world: World) -> list[bytes]:
    return world.journal.lines


async def a_hard_life() -> World:
    """Answers that do not come, a refused request, a refit that is taken back, a server that dies."""
    plan = FaultPlan(
        [parse_fault("hang-after@/pause_generation:2"), parse_fault("hang-after@/flush_cache:4")]
    )
    world = World(2, faults={"s0": plan}, config=SimConfig(memory_saver=True, skip_warmup=True))
    async with world.fleet as fleet:
        await fleet.release()
        with pytest.raises(CommandRefused):
            await fleet.resume()
        await fleet.release()
        await world.refit(1)
        task = asyncio.create_task(world.refit(2))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for version in (3, 4, 5):
            with contextlib.suppress(CycleAborted, CommandRefused):
                await world.refit(version)
        world.kill("s1")
        with pytest.raises((CycleAborted, CommandRefused)):
            await world.refit(9)
    return world


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return journal(run(a_hard_life()))


def test_a_true_journal_is_decided_the_same(lines: list[bytes]) -> None:
    """Requests, refusals, lost answers, abandons and deaths: all of it is decided again from the file."""
    text = b"".join(lines)
    for given in (
        b'"given":"tick"',
        b'"given":"abandon"',
        b'"turn":"refused"',
        b'"turn":"absorbed"',
        b'"name":"died"',
    ):
        assert given in text, given
    found = replay(lines)
    assert found.difference is None
    inputs = text.count(b'"kind":"input"')
    assert found.records == len(lines) - 2 - inputs


def test_a_journal_that_ends_anywhere_is_decided_as_far_as_it_goes(lines: list[bytes]) -> None:
    """A controller that died leaves a journal without an end; what is there is decided the same."""
    for count in range(1, len(lines), 7):
        assert replay(lines[:count]).difference is None


PATIENT = PLAYBOOK._replace(
    programs={goal: tuple(step for step in steps if step.name != "pause") for goal, steps in PROGRAMS.items()}
)


def test_another_planner_is_found_at_its_first_decision(lines: list[bytes]) -> None:
    """A planner that leaves a step out differs where that step was, and both decisions are told."""

    def without_pause(fleet: FleetView, given: Input, now_s: float, rules: Rules) -> Decision:
        return decide(fleet, given, now_s, rules, PATIENT)

    found = replay(lines, planner=without_pause).difference
    assert found is not None
    first = next(at for at, line in enumerate(lines, 1) if b'"event":{"name":"pause"' in line)
    assert found.line == first
    assert found.recorded is not None
    assert found.decided is not None
    named = [change for change in found.changes if change.field == "event.name"]
    assert [(change.recorded, change.decided) for change in named] == [("pause", "flush")]


def test_a_planner_that_decides_more_or_less_is_found(lines: list[bytes]) -> None:
    """A record that is not decided any more, or is new, is a difference, too."""

    def idle(fleet: FleetView, given: Input, now_s: float, rules: Rules) -> Decision:
        if isinstance(given, Tick):
            return Decision(fleet)
        return decide(fleet, given, now_s, rules)

    less = replay(lines, planner=idle).difference
    assert less is not None
    assert (less.recorded is not None, less.decided) == (True, None)
    line = next(at for at, line in enumerate(lines) if b'"verdict":"take","row":"serving/pause' in line)
    following = next(at for at in range(line, len(lines)) if b'"kind":"server"' in lines[at + 1])
    more = replay(renumbered([*lines[:following], *lines[following + 1 :]])).difference
    assert more is not None


def renumbered(lines: list[bytes]) -> list[bytes]:
    """The same bodies under hashes that fit."""
    previous, out = GENESIS, []
    for line in lines:
        body = line[len(b'{"hash":"","body":') + 64 : -1]
        previous = chain(previous, body)
        out.append(line_of(previous, body))
    return out


def impatient(rules: Rules, seconds: float) -> Rules:
    return rules._replace(name="mine", deadlines_s=tuple((kind, seconds) for kind, _ in rules.deadlines_s))


def test_under_another_policy_only_what_it_changes_is_a_difference(lines: list[bytes]) -> None:
    """Deadlines that nothing ran into are not compared; a proof that is asked for differently is told."""
    calm = run(a_calm_life())
    assert replay(calm, rules=impatient(COLOCATED, 45.0)).difference is None
    assert replay(calm, rules=COLOCATED._replace(name="twin")).difference is None
    checked = replay(calm, rules=policies.load("always_on").rules).difference
    assert checked is not None
    assert checked.decided is not None
    assert checked.decided["turn"] == "absorbed"


async def a_calm_life() -> list[bytes]:
    world = World(2, config=SimConfig(memory_saver=True, skip_warmup=True))
    async with world.fleet as fleet:
        await fleet.release()
        await world.refit(1)
    return journal(world)


def test_a_time_that_would_have_been_up_is_told(lines: list[bytes]) -> None:
    """Under shorter deadlines a command is given up that was waited for; under longer ones it is not."""
    calm = run(a_calm_life())
    sooner = replay(calm, rules=impatient(COLOCATED, 1e-6)).difference
    assert sooner is not None
    assert sooner.recorded is None
    assert sooner.decided is not None
    assert sooner.decided["event"]["name"] == "lost"  # type: ignore[index,call-overload]
    later = replay(lines, rules=impatient(COLOCATED, 300.0)).difference
    assert later is not None
    assert (later.recorded is not None, later.decided) == (True, None)


def test_what_is_no_journal_is_named(lines: list[bytes]) -> None:
    """An empty file, a broken chain, a server that is not there: one line that names the line."""
    with pytest.raises(AuditError, match="is empty"):
        replay([])
    with pytest.raises(AuditError, match="line 3: the chain is broken"):
        replay([*lines[:2], *lines[3:]])
    at = next(index for index, line in enumerate(lines) if b'"name":"enrolled"' in line)
    with pytest.raises(AuditError, match=f"line {at + 1}: .*s9"):
        replay(renumbered([*lines[:at], lines[at].replace(b'"server":"s0"', b'"server":"s9"')]))
