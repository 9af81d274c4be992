"""The real controller, driver and journal over simulated servers on the virtual clock."""

import asyncio

import pytest

from refitfsm import CommandRefused, NotServing
from refitfsm.sim.config import SimConfig
from refitfsm.sim.loop import run
from tests.support.world import TinySource, World

VERSIONS = ("0.5.12", "0.5.16", "0.5.23")
GREEDY = {"temperature": 0, "max_new_tokens": 6}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("policy", ["colocated", "always_on", "kv_only"])
def test_cycles_commit_under_every_policy_and_version(policy: str, version: str) -> None:
    """Five cycles with generation between commit, and every answer is of the weights that were pushed."""

    async def life() -> None:
        world = World(3, policy, version=version)
        async with world.fleet as fleet:
            seen = []
            for number in range(1, 6):
                answers = await asyncio.gather(*(fleet.generate([1, 2, 3], GREEDY) for _ in range(6)))
                assert len({answer.output_ids for answer in answers}) == 1
                assert {answer.version for answer in answers} == {number - 1}
                seen.append(answers[0].output_ids)
                world.check()
                await fleet.release()
                world.check()
                await world.refit(number)
                world.check()
            assert len(set(seen)) == 5
            assert sorted(world.serving()) == ["s0", "s1", "s2"]
        assert world.check_journal().committed == 6

    run(life())


def test_nothing_is_admitted_between_release_and_commit() -> None:
    """A request while memory is released is refused with the state, or waits for the commit if asked to."""

    async def life() -> None:
        world = World(2)
        async with world.fleet as fleet:
            await fleet.release()
            with pytest.raises(NotServing, match="released/closed"):
                await fleet.generate([1])
            waiting = asyncio.create_task(fleet.generate([1], wait_s=60))
            await world.refit(1)
            assert (await waiting).version == 1
            world.check()

    run(life())


def test_a_second_cycle_is_refused_while_one_is_open() -> None:
    """Two refits at once: one commits, the other is refused and nothing of it is sent."""

    async def life() -> None:
        world = World(2)
        async with world.fleet:
            first = asyncio.create_task(world.refit(1))
            await asyncio.sleep(0)
            with pytest.raises(CommandRefused, match="no_cycle_is_open"):
                await world.refit(2)
            await first
            world.check()
            assert world.fleet.status().serving_version == 1

    run(life())


@pytest.mark.parametrize("policy", ["colocated", "always_on"])
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.01, 0.02, 0.03])
def test_a_cancelled_refit_ends_before_its_weights_are_free(policy: str, after_s: float) -> None:
    """Cancelling a refit ends its cycle: nothing reads the weights after, and the next refit commits."""

    async def life() -> None:
        config = SimConfig(memory_saver=policy == "colocated", skip_warmup=True)
        world = World(2, policy, config=config)
        async with world.fleet as fleet:
            await fleet.release()
            task = asyncio.create_task(world.refit(1))
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fleet.status().cycle is None
            world.check()
            reads = TinySource.reads
            await asyncio.sleep(100)
            assert TinySource.reads == reads
            await world.refit(2)
            assert (await fleet.generate([1])).version == 2
            world.check()

    run(life())
