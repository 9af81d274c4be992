"""What may be committed: the weights that were staged last, on every server that holds them."""

import asyncio
from pathlib import Path

import pytest

from refitfsm import CommandRefused, ConfigError, CycleAborted
from refitfsm.model.states import Condition, Gate
from refitfsm.sim.config import FAST, SimConfig
from refitfsm.sim.faults import Fault, FaultPlan, parse_fault
from refitfsm.sim.loop import run
from refitfsm.weights.manifest import Manifest
from tests.support.world import TinySource, World

SPARING = """
description = "Goes on without servers that fail."
on_failure = "quarantine"
"""
KV_SUMS = """
description = "Only the cache is released, checksums are read."
release = ["kv_cache"]
verify = "checksum"
"""


class Deaf(FaultPlan):
    """While it is on, the harmless read before a command is lost."""

    on = False

    def draw(self, path: str) -> Fault | None:
        return parse_fault("lose-request@/model_info") if self.on and path == "/model_info" else None


def faults(*specs: str) -> FaultPlan:
    return FaultPlan(parse_fault(spec) for spec in specs)


def test_a_stage_that_was_given_up_ends_the_one_before() -> None:
    """The same version staged twice, the second time on one server only: neither can be committed."""

    async def life() -> None:
        deaf = Deaf()
        world = World(2, "always_on", version="0.5.16", faults={"s1": deaf})
        async with world.fleet as fleet:
            await world.stage(1)
            deaf.on = True
            with pytest.raises(CycleAborted):
                await fleet.stage(TinySource(2), 1)
            deaf.on = False
            with pytest.raises(CommandRefused, match="version_is_staged"):
                await fleet.commit(1)
            await world.refit(5)
            assert len(world.serving()) == 2
            world.check()
        world.check_journal()

    run(life())


@pytest.mark.parametrize(
    "fault", ["status-before=400@/pause_generation:1", "status-after=500@/update_weights_from_tensor:1"]
)
def test_a_commit_goes_on_without_a_server_that_was_not_staged(fault: str, tmp_path: Path) -> None:
    """Under quarantine, a server whose stage failed has no part in the commit, and is asked for nothing."""
    policy = tmp_path / "sparing.toml"
    policy.write_text(SPARING)

    async def life() -> None:
        config = SimConfig(sglang_version="0.5.16", skip_warmup=True, timings=FAST)
        world = World(2, str(policy), config=config, faults={"s1": faults(fault)})
        async with world.fleet as fleet:
            await world.stage(1)
            began_s = asyncio.get_running_loop().time()
            await fleet.commit(1)
            assert asyncio.get_running_loop().time() - began_s < 10.0
            assert [view.server for view, _ in world.views() if view.gate is Gate.OPEN] == ["s0"]
            assert (await fleet.generate([1], {"max_new_tokens": 1})).version == 1
            world.check()
        world.check_journal()

    run(life())


def test_checksums_outlive_a_release_of_the_cache(tmp_path: Path) -> None:
    """Staged, then the cache released, then committed: the checksums that were proved are still known."""
    policy = tmp_path / "sums.toml"
    policy.write_text(KV_SUMS)

    async def life() -> None:
        world = World(2, str(policy), version="0.5.16")
        async with world.fleet as fleet:
            await world.stage(1)
            await fleet.release()
            await fleet.commit(1)
            world.check()
        world.check_journal()

    run(life())


@pytest.mark.parametrize("version", [True, 1.0, "1", None])
def test_an_odd_version_commits_nothing(version: object) -> None:
    """A version is a whole number, for a commit as for a refit."""

    async def life() -> None:
        world = World(1)
        async with world.fleet as fleet:
            await world.stage(1)
            with pytest.raises(ConfigError, match="give a whole number"):
                await fleet.commit(version)  # type: ignore[arg-type]
            await fleet.commit(1)
        world.check_journal()

    run(life())


def test_weights_that_never_served_are_no_measure() -> None:
    """After a stage of part of the model, which is not committed, the whole model is taken."""

    class Part(TinySource):
        @property
        def manifest(self) -> Manifest:
            return Manifest(super().manifest.tensors[:3])

    async def life() -> None:
        world = World(1, "always_on")
        async with world.fleet as fleet:
            await fleet.stage(Part(1), 1)
            await world.refit(2)

    run(life())


def test_a_hook_is_not_called_for_a_refit_that_is_refused() -> None:
    """A trainer moves nothing for a refit that cannot begin."""

    async def life() -> None:
        called: list[str] = []
        world = World(1)
        async with world.fleet as fleet:
            await world.refit(3)
            with pytest.raises(CommandRefused, match="version_is_newer"):
                await fleet.refit(TinySource(2), 2, before_push=lambda: called.append("before"))
            assert called == []

    run(life())


def test_a_server_that_dies_between_stage_and_commit_ends_the_commit() -> None:
    """The commit is refused or given up, and nobody serves part of a fleet's version."""

    async def life() -> None:
        world = World(2, "always_on")
        async with world.fleet as fleet:
            await world.stage(1)
            world.kill("s1")
            with pytest.raises((CycleAborted, CommandRefused)):
                await fleet.commit(1)
            assert world.serving() == []
            assert fleet.status().servers[0].condition is Condition.HEALTHY
            world.check()
        world.check_journal()

    run(life())
