"""The parts of `push_benchmark` that push: one push, and one way of pushing."""

import base64
import pickle
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import pynvml
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from refitfsm.drivers.http import HttpTransport
from refitfsm.drivers.push import offer_and_body
from refitfsm.weights.offer import RankPlace, Target
from refitfsm.weights.plan import PushWish
from refitfsm.weights.torch_source import TorchSource
from tests.gpu.models import fill
from tests.real.server import call

Tensors = dict[str, torch.Tensor]
Row = dict[str, object]
Expected = dict[int, list[dict[str, str]]]
"""Each rank's checksums, by seed."""


class Weights(NamedTuple):
    """Tensors, the same on each GPU of a server, and the source that pushes them."""

    replicas: tuple[Tensors, ...]
    source: TorchSource

    @classmethod
    def of(cls, *replicas: Tensors) -> "Weights":
        return cls(replicas, TorchSource(replicas[0], replicas=replicas[1:]))

    def fill(self, seed: int) -> None:
        """Give all the values of a seed, and wait until they have them."""
        for index, tensors in enumerate(self.replicas):
            fill(tensors, seed)
            torch.cuda.synchronize(index)

    @property
    def ranks(self) -> tuple[RankPlace, ...]:
        return tuple(RankPlace(rank, gpu_uuid(rank)) for rank in range(len(self.replicas)))

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(gpu_uuid(rank) for rank in range(len(self.replicas)))


def used_bytes() -> int:
    """Memory of the GPU in use, by everybody."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def gpu_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def copies(one: Tensors, other: Tensors, repeats: int) -> dict[str, list[float]]:
    """Plain copies of all tensors on the GPU: one call for all, and one call each."""
    sources, targets = list(one.values()), list(other.values())

    def each() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    return {
        "foreach": [timed(lambda: torch._foreach_copy_(targets, sources)) for _ in range(repeats + 1)][1:],
        "each": [timed(each) for _ in range(repeats + 1)][1:],
    }


async def push(transport: HttpTransport, server: str, weights: Weights, wish: PushWish) -> dict[str, float]:
    """One push of everything, as the driver does it; seconds by part."""
    source = weights.source
    target = Target(server, weights.ranks)
    spent = {"plan": 0.0, "offer": 0.0, "post": 0.0, "settle": 0.0}
    began = time.perf_counter()
    plan = source.plan(wish)
    spent["plan"] = time.perf_counter() - began
    for chunk in plan.chunks:
        marks = [time.perf_counter()]
        offer, body = offer_and_body(source, chunk, target, "")
        marks.append(time.perf_counter())
        reply = await transport.request("POST", "/update_weights_from_tensor", body)
        marks.append(time.perf_counter())
        if reply.status != 200 or b'"success":true' not in reply.body.replace(b" ", b""):
            raise RuntimeError(f"{reply.status}: {reply.body[:300]!r}")
        settled = offer.settle()
        if not settled.applied:
            raise RuntimeError(f"not applied: {settled.note}")
        marks.append(time.perf_counter())
        for part, begin, end in zip(("offer", "post", "settle"), marks, marks[1:], strict=False):
            spent[part] += end - begin
    spent["total"] = time.perf_counter() - began
    spent["pushes"] = len(plan.chunks)
    return spent


def checksums(url: str) -> list[dict[str, str]]:
    """Of each rank, by the server's names."""
    ranks = call(url, "/weights_checker", {"action": "checksum"}).value["ranks"]
    return [rank["checksums"] for rank in ranks]


async def variant(
    name: str,
    url: str,
    weights: Weights,
    wish: PushWish,
    *,
    repeats: int,
    expected: Expected,
    fresh: bool = False,
) -> Row:
    """One way of pushing, repeated; the server's content compared at the end.

    With `fresh` the values change before each push: what is only replayed has to show that it copies.
    """
    source = weights.source
    transport = HttpTransport(url)
    seed = 1
    weights.fill(seed)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    samples = []
    try:
        await push(transport, url, weights, wish)
        for _ in range(repeats):
            if fresh:
                seed = 3 - seed
                weights.fill(seed)
            samples.append(await push(transport, url, weights, wish))
        good = checksums(url) == expected[seed]
    finally:
        await transport.aclose()
    peak = torch.cuda.max_memory_allocated() - held
    source.release()
    totals = [sample["total"] for sample in samples]
    return {
        "name": name,
        "seconds": totals,
        "median_s": statistics.median(totals),
        "parts_s": {part: statistics.median(s[part] for s in samples) for part in samples[0]},
        "extra_bytes": peak,
        "open_leases": len(source.open_leases),
        "content_right": good,
    }


class Rebuilt:
    """A tensor as torch shares it, with the GPU's UUID where SGLang wants it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        given = reduce_tensor(tensor)[1]
        self._arguments = (*given[:6], gpu_uuid(tensor.device.index), *given[7:])

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild_cuda_tensor, self._arguments


def careless(url: str, weights: Weights) -> Row:
    """What trainers write by hand: a connection and a request for each tensor, made by torch alone."""
    weights.fill(1)
    began = time.perf_counter()
    for name in weights.replicas[0]:
        pickled = [pickle.dumps([(name, Rebuilt(tensors[name]))]) for tensors in weights.replicas]
        entries = [base64.b64encode(each).decode() for each in pickled]
        call(url, "/update_weights_from_tensor", {"serialized_named_tensors": entries, "flush_cache": False})
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - began
    row: Row = {"name": "tensor, by hand", "seconds": [seconds], "median_s": seconds, "extra_bytes": 0}
    return row | {"parts_s": {}, "open_leases": 0, "content": checksums(url)}


async def plainest(url: str, weights: Weights, wish: PushWish) -> tuple[Row, Expected]:
    """One push a tensor, twice: what it takes, and the checksums that all other ways are compared with."""
    transport = HttpTransport(url)
    expected, samples = {}, []
    for seed in (1, 2):
        weights.fill(seed)
        samples.append(await push(transport, url, weights, wish))
        expected[seed] = checksums(url)
    await transport.aclose()
    assert expected[1] != expected[2]
    totals = [sample["total"] for sample in samples]
    parts = {part: statistics.median(s[part] for s in samples) for part in samples[0]}
    row: Row = {"name": "tensor", "seconds": totals, "median_s": statistics.median(totals), "parts_s": parts}
    row |= {"extra_bytes": 0, "open_leases": len(weights.source.open_leases), "content_right": True}
    return row, expected
