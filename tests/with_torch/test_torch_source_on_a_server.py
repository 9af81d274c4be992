"""Every way of pushing, into a real server on the CPU, from tensors in shared memory or as bytes."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from refitfsm import CycleAborted, Fleet
from refitfsm.audit.verify import verify_file
from refitfsm.server import LOADER
from refitfsm.weights.files import tiny_checkpoint
from refitfsm.weights.offer import Offer, Target
from refitfsm.weights.plan import ChunkPlan, Strategy
from refitfsm.weights.torch_source import TorchSource
from tests.real.server import RealServer, call, members
from tests.support.until import until

ROOT = Path(__file__).resolve().parents[2]
POLICY = """
description = "One server, by one way of pushing."
release = {release}
push_strategy = "{strategy}"
bucket_bytes = 60000
buffers = {buffers}
chunk_bytes_max = 200000
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start"), seed=0)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    flags = ("--custom-weight-loader", LOADER)
    with RealServer(
        Path(sys.executable), folder, memory_saver=True, flags=flags, pythonpath=(ROOT,)
    ) as running:
        yield running


def checksum(server: RealServer) -> str:
    answer = call(server.url, "/weights_checker", {"action": "checksum"})
    return str(answer.value["ranks"][0]["per_gpu_checksum"])


def reference(server: RealServer, tmp_path: Path, seeds: tuple[int, ...]) -> dict[int, str]:
    """The checksums of checkpoints that went the plainest way."""

    async def life() -> dict[int, str]:
        found = {}
        async with Fleet.connect([server.url], policy="always_on") as fleet:
            for version, seed in enumerate(seeds, start=1):
                await fleet.refit(tiny_checkpoint(tmp_path / f"seed{seed}", seed=seed), version)
                found[seed] = await asyncio.to_thread(checksum, server)
        return found

    return asyncio.run(life())


def policy(tmp_path: Path, strategy: Strategy, *, colocated: bool, buffers: int = 2) -> Path:
    path = tmp_path / f"{strategy}.toml"
    release = '["weights", "kv_cache"]' if colocated else "[]"
    path.write_text(POLICY.format(release=release, strategy=strategy, buffers=buffers))
    return path


def tensors(tmp_path: Path, seed: int) -> dict[str, torch.Tensor]:
    folder = tiny_checkpoint(tmp_path / f"load{seed}", seed=seed)
    return load_file(folder / "model.safetensors")


def in_one(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values as views of one allocation."""
    sizes = [tensor.numel() for tensor in given.values()]
    whole = torch.cat([tensor.reshape(-1) for tensor in given.values()])
    return {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(given.items(), whole.split(sizes), strict=True)
    }


@pytest.mark.parametrize("one_allocation", [False, True])
@pytest.mark.parametrize(
    ("strategy", "buffers"), [*((strategy, 2) for strategy in Strategy), (Strategy.BUCKET, 1)]
)
def test_every_way_gives_the_same_weights(
    server: RealServer, tmp_path: Path, strategy: Strategy, buffers: int, one_allocation: bool
) -> None:
    """After each of three refits the server holds what the tensors held, and nothing is still lent."""
    expected = reference(server, tmp_path, (1, 2))
    values = {seed: tensors(tmp_path, seed) for seed in (1, 2)}
    ours = {name: tensor.clone() for name, tensor in values[1].items()}
    if one_allocation:
        ours = in_one(ours)
    journal = tmp_path / "audit.jsonl"

    async def life() -> tuple[str, ...]:
        source = TorchSource(ours, share_host_memory=True)
        async with Fleet.connect(
            [server.url],
            policy=policy(tmp_path, strategy, colocated=False, buffers=buffers),
            journal=journal,
        ) as fleet:
            for version, seed in enumerate((1, 2, 1), start=1):
                for name, tensor in ours.items():
                    tensor.copy_(values[seed][name])
                await fleet.refit(source, version)
                assert await asyncio.to_thread(checksum, server) == expected[seed]
        lent = source.open_leases
        source.close()
        return lent

    lent = asyncio.run(life())
    assert len(lent) == (strategy in (Strategy.REGISTERED, Strategy.AUTO))
    assert verify_file(journal).committed == 4
    notes = journal.read_text().count('"replayed"')
    assert notes == 2 * (strategy in (Strategy.REGISTERED, Strategy.AUTO))


def test_registered_weights_survive_a_release(server: RealServer, tmp_path: Path) -> None:
    """Three colocated cycles: the plan recorded before a release is right after it."""
    expected = reference(server, tmp_path, (1, 2))
    values = {seed: tensors(tmp_path, seed) for seed in (1, 2)}
    ours = {name: tensor.clone() for name, tensor in values[1].items()}
    journal = tmp_path / "audit.jsonl"

    async def life() -> None:
        source = TorchSource(ours, share_host_memory=True)
        path = policy(tmp_path, Strategy.REGISTERED, colocated=True)
        async with Fleet.connect([server.url], policy=path, journal=journal) as fleet:
            for version, seed in enumerate((1, 2, 1), start=1):
                await fleet.release()
                for name, tensor in ours.items():
                    tensor.copy_(values[seed][name])
                await fleet.refit(source, version)
                assert await asyncio.to_thread(checksum, server) == expected[seed]
        source.close()

    asyncio.run(life())
    assert journal.read_text().count('"replayed"') == 2


def test_tensors_that_moved_are_registered_again(server: RealServer, tmp_path: Path) -> None:
    """A source over other memory, after one that was closed, is not mistaken for it; the audit says why."""
    expected = reference(server, tmp_path, (1, 2))
    journal = tmp_path / "audit.jsonl"

    async def life() -> None:
        path = policy(tmp_path, Strategy.REGISTERED, colocated=False)
        async with Fleet.connect([server.url], policy=path, journal=journal) as fleet:
            ours = tensors(tmp_path, 1)
            source = TorchSource(ours, share_host_memory=True)
            await fleet.refit(source, 1)
            assert await asyncio.to_thread(checksum, server) == expected[1]
            moved = tensors(tmp_path, 2)
            for name, tensor in ours.items():
                tensor.set_(moved[name])  # as a trainer does that loads into new memory
            await fleet.refit(source, 2)
            assert await asyncio.to_thread(checksum, server) == expected[2]
            source.close()
            other = TorchSource(tensors(tmp_path, 1), share_host_memory=True)
            await fleet.refit(other, 3)
            assert await asyncio.to_thread(checksum, server) == expected[1]
            other.close()

    asyncio.run(life())
    assert "the sender's tensors have moved" in journal.read_text()


def test_a_registration_that_the_server_lost_is_made_again(server: RealServer, tmp_path: Path) -> None:
    """Another sender registers in between: the first finds out, sends everything, and says why."""
    expected = reference(server, tmp_path, (1, 2))
    journal = tmp_path / "audit.jsonl"

    async def life() -> None:
        path = policy(tmp_path, Strategy.REGISTERED, colocated=False)
        async with Fleet.connect([server.url], policy=path, journal=journal) as fleet:
            first = TorchSource(tensors(tmp_path, 1), share_host_memory=True)
            second = TorchSource(tensors(tmp_path, 2), share_host_memory=True)
            await fleet.refit(first, 1)
            await fleet.refit(second, 2)
            assert await asyncio.to_thread(checksum, server) == expected[2]
            await fleet.refit(first, 3)
            assert await asyncio.to_thread(checksum, server) == expected[1]
            first.close()
            second.close()

    asyncio.run(life())
    assert "not replayed: the server does not know the registration" in journal.read_text()


def test_bytes_need_no_shared_memory(server: RealServer, tmp_path: Path) -> None:
    """A state dict of ordinary CPU tensors goes as bytes, in chunks."""
    expected = reference(server, tmp_path, (1, 2))

    async def life() -> None:
        async with Fleet.connect([server.url], policy="always_on") as fleet:
            await fleet.refit(tensors(tmp_path, 2), 1)
            assert await asyncio.to_thread(checksum, server) == expected[2]
            await fleet.refit(iter(tensors(tmp_path, 1).items()), 2)
            assert await asyncio.to_thread(checksum, server) == expected[1]

    asyncio.run(life())


class Stopping(TorchSource):
    """Stops a server's scheduler when it is about to be pushed to: the push is taken, and not carried out."""

    server: RealServer

    def offer(self, chunk: ChunkPlan, target: Target) -> Offer:
        made = super().offer(chunk, target)
        for pid in members(self.server.pid):
            if pid != self.server.pid:
                os.kill(pid, signal.SIGSTOP)
        return made


def test_a_server_that_dies_in_a_push_holds_nothing(server: RealServer, folder: Path, tmp_path: Path) -> None:
    """A server is killed while memory is lent to it: the cycle ends, names it, and no lease stays open. The
    same tensors can then be pushed to a server that lives."""
    expected = reference(server, tmp_path, (1,))
    ours = tensors(tmp_path, 1)

    async def life(server: RealServer) -> tuple[str, ...]:
        source = Stopping(ours, share_host_memory=True)
        source.server = server
        path = policy(tmp_path, Strategy.LIST, colocated=False)
        async with Fleet.connect([server.url], policy=path) as fleet:
            refit = asyncio.create_task(fleet.refit(source, 1))
            await until(lambda: bool(source.open_leases))
            server.kill()
            with pytest.raises(CycleAborted, match=server.url):
                await refit
            lent = source.open_leases
        source.close()
        return lent

    async def again() -> None:
        path = policy(tmp_path, Strategy.LIST, colocated=False)
        async with Fleet.connect([server.url], policy=path) as fleet:
            source = TorchSource(ours, share_host_memory=True)
            await fleet.refit(source, 1)
            assert source.open_leases == ()
            source.close()

    with RealServer(Path(sys.executable), folder) as running:
        assert asyncio.run(life(running)) == ()
    asyncio.run(again())
    assert checksum(server) == expected[1]


def mapped(server: RealServer, tensor: torch.Tensor) -> bool:
    """Whether any process of a server maps the memory of a shared tensor."""
    _, handle, _ = tensor.untyped_storage()._share_filename_cpu_()
    return any(handle in Path(f"/proc/{pid}/maps").read_bytes() for pid in members(server.pid))


@pytest.mark.parametrize("colocated", [False, True])
def test_a_last_refit_leaves_nothing_mapped(server: RealServer, tmp_path: Path, colocated: bool) -> None:
    """A refit that is to be the last gives the right weights and ends the registration; so does the first
    of all, and one more after it registers anew. Without it the server keeps the memory mapped."""
    expected = reference(server, tmp_path, (1, 2))
    values = {seed: tensors(tmp_path, seed) for seed in (1, 2)}
    ours = {name: tensor.clone() for name, tensor in values[1].items()}
    first = next(iter(ours.values()))
    journal = tmp_path / "audit.jsonl"

    async def life() -> None:
        source = TorchSource(ours, share_host_memory=True)
        path = policy(tmp_path, Strategy.AUTO, colocated=colocated)
        async with Fleet.connect([server.url], policy=path, journal=journal) as fleet:
            for version, seed in enumerate((1, 2, 1, 2), start=1):
                if colocated:
                    await fleet.release()
                for name, tensor in ours.items():
                    tensor.copy_(values[seed][name])
                if version == 3:
                    assert mapped(server, first)
                    source.forget_after_refit()
                await fleet.refit(source, version)
                assert await asyncio.to_thread(checksum, server) == expected[seed]
                assert source.open_leases == (() if version >= 3 else (server.url,))
                assert mapped(server, first) == (version < 3)
        source.close()

    asyncio.run(life())
    verify_file(journal)
    text = journal.read_text()
    assert (text.count('"registered"'), text.count('"replayed"'), text.count('"forgotten"')) == (2, 2, 2)


def test_memory_stays_countable_when_registrations_change(server: RealServer, tmp_path: Path) -> None:
    """A tensor moves, another sender comes between: the server lives, content is right, and a lease is open
    exactly where memory is still mapped."""
    expected = reference(server, tmp_path, (1, 2))

    async def life() -> None:
        path = policy(tmp_path, Strategy.REGISTERED, colocated=False)
        async with Fleet.connect([server.url], policy=path) as fleet:
            ours = tensors(tmp_path, 1)
            first = TorchSource(ours, share_host_memory=True)
            second = TorchSource(tensors(tmp_path, 2), share_host_memory=True)
            await fleet.refit(first, 1)
            moved = next(iter(ours.values()))
            moved.set_(moved.clone())
            await fleet.refit(first, 2)
            assert (len(first.open_leases), len(second.open_leases)) == (1, 0)
            await fleet.refit(second, 3)
            assert (len(first.open_leases), len(second.open_leases)) == (0, 1)
            await fleet.refit(first, 4)
            assert await asyncio.to_thread(checksum, server) == expected[1]
            assert (len(first.open_leases), len(second.open_leases)) == (1, 0)
            first.close()
            second.close()

    asyncio.run(life())
