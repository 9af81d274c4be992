"""Servers take memory back only when there is room for it."""

import asyncio
from collections.abc import Callable

import pytest

from refitfsm import CycleAborted, Fleet, policies
from refitfsm.audit.journal import MemoryJournal, header
from refitfsm.drivers.push import inline
from refitfsm.sim.config import SimConfig, Timings
from refitfsm.sim.ledger import GpuLedger
from refitfsm.sim.loop import run
from refitfsm.sim.server import SimServer
from refitfsm.sim.transport import SimTransport
from tests.support.world import TinySource

GPU = "GPU-0"
KV_BYTES = 4 << 30
CAPACITY = 2 * KV_BYTES + (1 << 30)


class LedgerMeter:
    """Measures simulated GPUs."""

    def __init__(self, ledger: GpuLedger) -> None:
        self.ledger = ledger

    def free_bytes(self, gpu_uuid: str) -> int | None:
        return self.ledger.free(gpu_uuid)


class Shared:
    """Two servers and a trainer on one GPU."""

    def __init__(self, *, measured: bool = True) -> None:
        self.ledger = GpuLedger({GPU: CAPACITY})
        config = SimConfig(
            sglang_version="0.5.16",
            memory_saver=True,
            timings=Timings(),  # memory is taken a while after it was measured
            skip_warmup=True,
            kv_cache_bytes=KV_BYTES,
            gpus=(GPU,),
        )
        self.servers = {name: SimServer(config, name=name, ledger=self.ledger) for name in ("a", "b")}
        named = policies.load("colocated")
        self.fleet = Fleet(
            {name: SimTransport(server) for name, server in self.servers.items()},
            named,
            run_id="r",
            journal=MemoryJournal(header("r", named.rules, list(self.servers), "2026-01-01T00:00:00+00:00")),
            gpus=dict.fromkeys(self.servers, (GPU,)),
            aside=inline,
            meter=LedgerMeter(self.ledger) if measured else None,
        )

    def train(self, nbytes: int) -> None:
        assert self.ledger.take(GPU, "trainer", nbytes)

    def done(self) -> None:
        self.ledger.give_back(GPU, "trainer")


def with_fleet(life: Callable[[Shared], object], *, measured: bool = True) -> None:
    async def main() -> None:
        shared = Shared(measured=measured)
        async with shared.fleet:
            await life(shared)  # type: ignore[misc]

    run(main())


def test_a_resume_waits_for_the_trainer() -> None:
    """A trainer that frees its memory a while after the refit began is waited for."""

    async def life(shared: Shared) -> None:
        await shared.fleet.release()
        shared.train(CAPACITY - KV_BYTES)
        asyncio.get_running_loop().call_later(20.0, shared.done)
        began = asyncio.get_running_loop().time()
        await shared.fleet.refit(TinySource(1), 1)
        assert asyncio.get_running_loop().time() - began >= 20.0
        assert all(server.truth.alive for server in shared.servers.values())

    with_fleet(life)


def test_no_room_is_an_error_and_no_death() -> None:
    """A trainer that keeps the memory costs the cycle, says how much is missing, and kills nobody."""

    async def life(shared: Shared) -> None:
        await shared.fleet.release()
        shared.train(CAPACITY - KV_BYTES)
        with pytest.raises(CycleAborted, match=r"bytes free and .* are needed.*Free the trainer's memory"):
            await shared.fleet.refit(TinySource(1), 1)
        assert all(server.truth.alive for server in shared.servers.values())
        shared.done()
        await shared.fleet.refit(TinySource(2), 2)
        assert (await shared.fleet.generate([1], {"max_new_tokens": 1})).version == 2

    with_fleet(life)


def test_without_a_meter_no_room_kills() -> None:
    """The same without a measurement: the check above can fail."""

    async def life(shared: Shared) -> None:
        await shared.fleet.release()
        shared.train(CAPACITY - KV_BYTES)
        with pytest.raises(CycleAborted):
            await shared.fleet.refit(TinySource(1), 1)
        assert not all(server.truth.alive for server in shared.servers.values())

    with_fleet(life, measured=False)


def test_two_servers_do_not_see_the_same_room() -> None:
    """With room for one cache, the second server waits for the first to have it and is then refused."""

    async def life(shared: Shared) -> None:
        await shared.fleet.release()
        shared.train(CAPACITY - KV_BYTES - (1 << 30))
        with pytest.raises(CycleAborted, match="are needed"):
            await shared.fleet.refit(TinySource(1), 1)
        assert all(server.truth.alive for server in shared.servers.values())

    with_fleet(life)
