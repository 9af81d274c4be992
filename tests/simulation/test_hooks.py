"""A trainer that takes its weights away between push and commit."""

import pytest

from refitfsm import NotServing
from refitfsm.model.states import ServerState, Tag
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.loop import run
from tests.support.world import TinySource, World


def test_hooks_have_the_gpu_to_themselves() -> None:
    """Before the push nothing is resumed, after it only the weights are, and the commit serves them."""

    async def life() -> None:
        world = World(2)
        seen: list[tuple[str, frozenset[Tag]]] = []

        async def before() -> None:
            seen.extend(("before", view.resident) for view, _ in world.views())

        def after() -> None:
            seen.extend(("after", server.truth.resident) for _, server in world.views())

        async with world.fleet as fleet:
            await fleet.release()
            world.digests[1] = digest_of(tiny_model(1))
            report = await fleet.refit(TinySource(1), 1, before_push=before, after_push=after)
            assert seen[:2] == [("before", frozenset())] * 2
            for when, resident in seen[2:]:
                assert (when, Tag.WEIGHTS in resident, Tag.KV_CACHE in resident) == ("after", True, False)
            assert (report.version, set(report.phases_s) >= {"push", "resume", "flush"}) == (1, True)
            assert len(world.serving()) == 2
            world.check()
        world.check_journal()

    run(life())


def test_a_hook_that_raises_leaves_the_weights_staged() -> None:
    """The error reaches the caller, nobody serves, and a commit goes on from there."""

    async def life() -> None:
        world = World(1)

        def fails() -> None:
            raise OSError("no room on the host")

        async with world.fleet as fleet:
            await fleet.release()
            world.digests[1] = digest_of(tiny_model(1))
            with pytest.raises(OSError, match="no room"):
                await fleet.refit(TinySource(1), 1, after_push=fails)
            (view,) = fleet.status().servers
            assert view.state is ServerState.WEIGHTS_STAGED
            with pytest.raises(NotServing):
                await fleet.generate([1])
            await fleet.commit(1)
            assert (await fleet.generate([1], {"max_new_tokens": 1})).version == 1
            world.check()
        world.check_journal()

    run(life())


def test_staged_weights_do_not_serve_without_memory_saver_either() -> None:
    """Where nothing is released, a stage still keeps the gate shut until the commit."""

    async def life() -> None:
        world = World(2, "always_on")
        async with world.fleet as fleet:
            await world.stage(1)
            assert fleet.status().serving_version == 0
            with pytest.raises(NotServing):
                await fleet.generate([1])
            await fleet.commit(1)
            assert (await fleet.generate([1], {"max_new_tokens": 1})).version == 1
            world.check()
        world.check_journal()

    run(life())
