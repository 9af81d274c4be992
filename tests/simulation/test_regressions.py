"""Faults that were found once, each as the law that it broke."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import pytest

from refitfsm import (
    CommandRefused,
    ConfigError,
    ControllerClosed,
    CycleAborted,
    Fleet,
    RefitError,
    RequestFailed,
    policies,
)
from refitfsm.drivers.push import inline
from refitfsm.sim.config import FAST, SimConfig
from refitfsm.sim.faults import FaultPlan, parse_fault
from refitfsm.sim.loop import VirtualLoop, run
from refitfsm.sim.server import SimServer
from refitfsm.sim.transport import SimTransport
from refitfsm.weights.manifest import Manifest
from refitfsm.weights.offer import Offer, Target
from refitfsm.weights.plan import ChunkPlan
from tests.support.armed import ArmedFaults
from tests.support.world import TinySource, World

VERSIONS = ("0.5.16", "0.5.23")


def fleet_over(transports: Mapping[str, SimTransport], **options: object) -> Fleet:
    """A fleet over servers that exist already."""
    return Fleet(transports, policies.load("colocated"), aside=inline, **options)  # type: ignore[arg-type]


def test_a_waiting_request_is_told_that_the_fleet_is_shut_down() -> None:
    """Who waits for a gate when the owner leaves gets an error, and the loop goes on."""

    async def life() -> None:
        world = World(2)
        async with world.fleet as fleet:
            await fleet.release()
            waiting = asyncio.create_task(fleet.generate([1], wait_s=1000))
            await asyncio.sleep(1)
        with pytest.raises(ControllerClosed):
            await waiting

    run(life())


@pytest.mark.parametrize("goal", ["refit", "release"])
def test_a_loop_that_was_blocked_past_the_deadline_commits_nothing(
    goal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is judged after the cycle's end, before any tick, is no reason to call it reached."""

    async def life() -> None:
        world = World(2)
        async with world.fleet as fleet:
            if goal == "refit":
                await fleet.release()
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            request = SimTransport.request
            late = {"refit": "/resume_memory_occupation", "release": "/pause_generation"}[goal]
            blocked: list[str] = []

            async def slow(self: SimTransport, method: str, path: str, body: bytes | None = None) -> object:
                reply = await request(self, method, path, body)
                if path == late and not blocked:
                    blocked.append(path)
                    loop._now += 700.0
                return reply

            monkeypatch.setattr(SimTransport, "request", slow)
            with pytest.raises(CycleAborted, match="not done within"):
                await (world.refit(1) if goal == "refit" else fleet.release())
            assert fleet.status().serving_version == 0
            world.check()
        assert world.check_journal().aborted == 1
        assert world.serving_truly() == ([] if goal == "refit" else ["s0", "s1"])

    run(life())


def test_gpus_must_be_as_many_as_ranks() -> None:
    """A server for which too few GPUs are named is refused: a short list of payloads would kill it."""

    async def life() -> None:
        server = SimServer(SimConfig(tp_size=2, timings=FAST), name="s0")
        with pytest.raises(ConfigError, match="name one GPU for each rank"):
            async with fleet_over({"s0": SimTransport(server)}, gpus={"s0": ("a",)}):
                raise AssertionError("it was taken")
        assert server.truth.alive

    run(life())


def test_one_server_under_two_addresses_is_found() -> None:
    """A server that is given twice under different addresses is refused before it is released twice."""

    async def life() -> None:
        server = SimServer(SimConfig(timings=FAST), name="s0")
        with pytest.raises(ConfigError, match="two addresses"):
            async with fleet_over({"a": SimTransport(server), "b": SimTransport(server)}):
                raise AssertionError("it was taken twice")
        assert server.truth.alive

    run(life())


def test_a_refused_connect_does_not_hide_what_the_servers_hold() -> None:
    """Servers with different weights are refused the second time as the first."""

    async def life() -> None:
        servers = {name: SimServer(SimConfig(timings=FAST), name=name) for name in ("a", "b")}
        transports = {name: SimTransport(server) for name, server in servers.items()}
        async with fleet_over({"a": transports["a"]}) as fleet:
            await fleet.refit(TinySource(1), 1)
        for _ in range(2):
            with pytest.raises(ConfigError, match="different weights"):
                async with fleet_over(transports):
                    raise AssertionError("mixed weights were taken")

    run(life())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("skip_warmup", [True, False])
def test_servers_that_a_dead_trainer_left_released_are_not_taken(version: str, skip_warmup: bool) -> None:
    """A paused server is refused at connect, and soon, whether or not it had a warm-up."""

    async def life() -> None:
        config = SimConfig(sglang_version=version, skip_warmup=skip_warmup, timings=FAST)
        server = SimServer(config, name="s0")
        async with fleet_over({"s0": SimTransport(server)}) as fleet:
            await fleet.release()
        with pytest.raises(ConfigError, match="paused by somebody else"):
            async with fleet_over({"s0": SimTransport(server)}):
                raise AssertionError("it was taken")
        assert server.truth.alive
        assert asyncio.get_running_loop().time() < 200

    run(life())


def test_a_death_that_is_met_twice_counts_once() -> None:
    """Two requests that find the same server dead do not drop it twice: the others go on."""

    async def life() -> None:
        world = World(2, "tests/support/policies/quarantine.toml")
        async with world.fleet as fleet:
            asked = [asyncio.create_task(fleet.generate([1], {"max_new_tokens": 500})) for _ in range(4)]
            await asyncio.sleep(0.05)
            refit = asyncio.create_task(world.refit(1))
            await asyncio.sleep(0.01)
            world.kill("s0")
            await refit
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert any(isinstance(result, RequestFailed) for result in results)
            assert world.serving() == ["s1"]

    run(life())


def test_a_refused_refit_sets_no_measure_for_the_next() -> None:
    """Weights that were never served are not what later weights are compared with."""

    class Half(TinySource):
        @property
        def manifest(self) -> Manifest:
            return Manifest(super().manifest.tensors[:3])

    async def life() -> None:
        world = World(1)
        async with world.fleet as fleet:
            with pytest.raises(CommandRefused):
                await fleet.refit(Half(1), 0)
            await world.refit(1)
            with pytest.raises(ConfigError, match="is missing"):
                await fleet.refit(Half(2), 2)

    run(life())


@pytest.mark.parametrize("version", [1.0, "1", None, True, 2**53, -1])
def test_a_version_is_a_whole_number(version: object) -> None:
    """Anything else is refused before anything is sent, and the fleet serves on."""

    async def life() -> None:
        world = World(1)
        async with world.fleet as fleet:
            with pytest.raises((ConfigError, CommandRefused)):
                await fleet.refit(TinySource(1), version)  # type: ignore[arg-type]
            assert world.serving() == ["s0"]
        world.check_journal()

    run(life())


def test_a_source_that_raises_leaves_servers_usable() -> None:
    """Weights that cannot be made were not sent: the next refit puts everything right."""

    class Broken(TinySource):
        def offer(self, chunk: ChunkPlan, target: Target) -> Offer:
            raise RuntimeError("CUDA out of memory")

    async def life() -> None:
        world = World(2)
        async with world.fleet as fleet:
            with pytest.raises(CycleAborted, match="out of memory"):
                await fleet.refit(Broken(1), 1)
            await world.refit(1)
            assert len(world.serving()) == 2
            world.check()

    run(life())


@pytest.mark.parametrize("fault", ["status-before=502", "lose-answer", "lose-request"])
def test_a_blip_of_a_harmless_read_costs_nothing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read before a release goes wrong once: it is read again, and nobody becomes suspect."""
    monkeypatch.setattr("tests.support.armed.HARMLESS_READS", ("/generate",))

    async def life() -> None:
        faults = ArmedFaults()
        world = World(1, faults={"s0": faults})
        async with world.fleet as fleet:
            faults.armed.append(fault)
            await fleet.release()
            assert faults.struck == [("/model_info", fault)]
            await world.refit(1)
            world.check()

    run(life())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_replaced_between_two_chunks_does_not_commit(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process in mid-push holds half of the weights: it is found before the next chunk."""

    async def life() -> None:
        world = World(1, version=version)
        server = world.servers["s0"]
        request = SimTransport.request
        pushes: list[str] = []

        async def replaced(self: SimTransport, method: str, path: str, body: bytes | None = None) -> object:
            reply = await request(self, method, path, body)
            if path == "/update_weights_from_tensor":
                pushes.append(path)
                if len(pushes) == 1:
                    world.kill("s0")
                    server.restart()
                    await asyncio.sleep(0.1)
            return reply

        async with world.fleet as fleet:
            monkeypatch.setattr(SimTransport, "request", replaced)
            with pytest.raises(CycleAborted, match="another process"):
                await world.refit(1)
            assert len(pushes) == 1
            assert fleet.status().serving_version == 0

    run(life())


def test_a_logger_that_raises_breaks_no_step() -> None:
    """Whoever listens is called on their own: a cycle commits all the same."""

    class Bad:
        def bind(self, **values: object) -> "Bad":
            return self

        def log(self, level: int, event: str, **values: object) -> object:
            raise RuntimeError("the log's disk is full")

    async def life() -> None:
        seen: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: seen.append(context))
        server = SimServer(SimConfig(timings=FAST), name="s0")
        async with fleet_over({"s0": SimTransport(server)}, logger=Bad()) as fleet:
            await fleet.refit(TinySource(1), 1)
            assert fleet.status().serving_version == 1
        assert seen

    run(life())


@pytest.mark.parametrize("path", ["/begin_weight_update", "/end_weight_update", "/pause_generation"])
def test_an_error_500_says_nothing_of_what_was_done(path: str) -> None:
    """A call that was carried out and answered with 500 leaves no false belief of the server."""

    async def life() -> None:
        world = World(2, faults={"s1": FaultPlan([parse_fault(f"status-after=500@{path}:1")])})
        async with world.fleet as fleet:
            await fleet.release()
            with suppress(RefitError):
                await world.refit(1)
            world.check()
        world.check_journal()

    run(life())
