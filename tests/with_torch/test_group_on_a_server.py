"""Two trainer ranks, each with half of every tensor, push to a real server through one fleet."""

import asyncio
import sys
from functools import partial
from pathlib import Path

from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from refitfsm import Fleet
from refitfsm.weights.files import tiny_checkpoint
from refitfsm.weights.gather import Gatherer
from refitfsm.weights.group import GroupSource, follow
from refitfsm.weights.plan import PushPlan, plan_list
from tests.real.server import RealServer, call
from tests.with_torch.ranks import Seat, results

PATIENT_S = 60.0
CHUNK_BYTES = 100_000


def in_small_chunks(manifest: object, _wish: object) -> PushPlan:
    return plan_list(manifest, CHUNK_BYTES)  # type: ignore[arg-type]


def trainer(url: str, folder: str, seat: Seat) -> object:
    """One rank: half of each tensor, and the fleet if it is the leader."""
    seat.meet()
    mesh = init_device_mesh("cpu", (seat.size,))
    whole = load_file(Path(folder) / "model.safetensors")
    weights = Gatherer({name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()})
    group = seat.group()
    if seat.rank != group.leader:
        return follow(group, weights, timeout_s=PATIENT_S)

    async def life() -> int:
        async with Fleet.connect([url], policy="always_on") as fleet:
            make = partial(GroupSource, group, weights, timeout_s=PATIENT_S, planner=in_small_chunks)
            source = await asyncio.to_thread(make)
            report = await fleet.refit(source, 1)
            await asyncio.to_thread(source.close, 1)
            return report.version

    return asyncio.run(life())


def checksum(url: str) -> str:
    return str(call(url, "/weights_checker", {"action": "checksum"}).value["ranks"][0]["per_gpu_checksum"])


def test_halves_arrive_whole(tmp_path: Path) -> None:
    """After the refit the server has the checksum of a whole push, and both ranks know the version."""
    first, second = (tiny_checkpoint(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 1)))
    with RealServer(Path(sys.executable), first) as server:

        async def plainly(folder: Path, version: int) -> str:
            async with Fleet.connect([server.url], policy="always_on") as fleet:
                await fleet.refit(folder, version)
            return await asyncio.to_thread(checksum, server.url)

        expected = asyncio.run(plainly(second, 1))
        other = asyncio.run(plainly(first, 1))
        assert results(2, partial(trainer, server.url, str(second))) == [1, 1]
        assert checksum(server.url) == expected != other
