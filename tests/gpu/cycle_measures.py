"""The parts of `push_benchmark` that run whole colocated cycles: times, and what is left."""

import asyncio
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from refitfsm import Fleet, ServerSpec
from refitfsm.reports import CycleReport
from tests.gpu.push_measures import Expected, Row, Weights, checksums, used_bytes
from tests.gpu.server import GpuServer

TRAIN_S = 1.0
"""How long the trainer is taken to train: CUDA cleans what was released meanwhile, or at the resume."""
GROWTH_BYTES_MAX = 8 << 20


def phases(released: CycleReport, refit: CycleReport) -> dict[str, float]:
    return {
        **{f"{kind} (release)": seconds for kind, seconds in released.phases_s.items()},
        **{f"{kind} (refit)": seconds for kind, seconds in refit.phases_s.items()},
    }


async def cycles(
    servers: Sequence[GpuServer],
    weights: Weights,
    expected: Expected,
    *,
    policy: str,
    count: int,
    train_s: float,
) -> Row:
    """Colocated cycles through the fleet, the weights changed in between, the content compared after each."""
    urls = [server.url for server in servers]
    rows = []
    async with Fleet.connect(
        [ServerSpec(url, weights.gpus) for url in urls], policy=Path(__file__).with_name(f"{policy}.toml")
    ) as fleet:
        for version in range(1, count + 1):
            full = used_bytes()
            released = await fleet.release()
            empty = used_bytes()
            seed = 1 + version % 2
            weights.fill(seed)
            await asyncio.sleep(train_s)
            refit = await fleet.refit(weights.source, version)
            spent, seconds = phases(released, refit), released.seconds + refit.seconds
            row: Row = {
                "seconds": seconds,
                "release_s": released.seconds,
                "refit_s": refit.seconds,
                "phases_s": spent,
                "freed_bytes": full - empty,
                "content_right": [await asyncio.to_thread(checksums, url) == expected[seed] for url in urls],
            }
            if len(urls) == 1:  # servers side by side overlap
                row["controller_share"] = 1 - sum(spent.values()) / seconds
            rows.append(row)
            answer = await fleet.generate([5, 6, 7], {"temperature": 0, "max_new_tokens": 4})
            assert answer.version == version
    return {"servers": len(urls), "policy": policy, "train_s": train_s, "cycles": rows}


async def life(server: GpuServer, weights: Weights, *, policy: str, count: int) -> Row:
    """Memory and handles of both sides after each of many cycles."""
    states = []
    spent = []
    async with Fleet.connect(
        [ServerSpec(server.url, weights.gpus)], policy=Path(__file__).with_name(f"{policy}.toml")
    ) as fleet:
        for version in range(1, count + 1):
            released = await fleet.release()
            refit = await fleet.refit(weights.source, version)
            spent.append(released.seconds + refit.seconds)
            states.append(state(server, weights))
    settled, last = states[1], states[-1]  # the first cycle allocates what is used again
    above = {key: max(each[key] for each in states[1:]) - settled[key] for key in settled}
    clean = all(most <= (GROWTH_BYTES_MAX if key == "gpu_bytes" else 0) for key, most in above.items())
    return {
        "policy": policy,
        "count": count,
        "median_s": statistics.median(spent),
        "after_the_second": settled,
        "after_the_last": last,
        "most_above_the_second": above,
        "clean": clean,
    }


def state(server: GpuServer, weights: Weights) -> dict[str, int]:
    """What is held: GPU memory by all, tensors by the sender, leases, and files open on either side."""
    return {
        "gpu_bytes": used_bytes(),
        "sender_bytes": torch.cuda.memory_allocated(),
        "open_leases": len(weights.source.open_leases),
        "sender_files": open_files(os.getpid()),
        "server_files": sum(map(open_files, group(server.pid))),
        "shared_memory_files": sum(1 for _ in Path("/dev/shm").iterdir()),
    }


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def group(leader: int) -> list[int]:
    """The processes of a server."""
    return [
        int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and of_group(each, leader)
    ]


def of_group(process: Path, leader: int) -> bool:
    try:
        return os.getpgid(int(process.name)) == leader
    except ProcessLookupError:
        return False
