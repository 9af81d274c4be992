"""A trainer's ranks as processes of this machine, and what they push to servers that are mere targets."""

import base64
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from refitfsm.weights.dtypes import from_torch
from refitfsm.weights.group import GroupSource, RankGroup
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.offer import RankPlace, Settled, Target
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.plan import PushWish

WAIT_S = 90.0
"""How long a test waits before it calls it a hang."""
_START = multiprocessing.get_context("forkserver")
_START.set_forkserver_preload(["torch", __name__])


class Seat(NamedTuple):
    """What a rank's process is given."""

    rank: int
    size: int
    port: int

    def store(self) -> dist.TCPStore:
        """The store that all ranks share, and the test too."""
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=WAIT_S))

    def meet(self) -> None:
        """Make the default process group."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.PrefixStore("torch", self.store())
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def group(self, leader: int = 0) -> RankGroup:
        """This rank's view of the group."""
        return RankGroup(self.store(), self.rank, self.size, leader)


class Outcome(NamedTuple):
    """What became of a rank: what its work returned, or the error's type and text, or nothing if it ended."""

    result: object = None
    error: str = ""
    text: str = ""
    took_s: float = 0.0
    ended: bool = False


def _child(work: Callable[[Seat], object], seat: Seat, parent: Connection) -> None:
    begun_s = time.monotonic()
    try:
        result = work(seat)
    except BaseException as error:  # noqa: BLE001 - the parent judges
        parent.send(Outcome(None, type(error).__name__, str(error), time.monotonic() - begun_s))
    else:
        parent.send(Outcome(result, took_s=time.monotonic() - begun_s))


class Ranks:
    """A process for each rank, and a store in this one. All have to end by themselves."""

    def __init__(self, size: int, work: Callable[[Seat], object]) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = _START.Pipe()
            process = _START.Process(
                target=_child, args=(work, Seat(rank, size, self.store.port), there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def outcome(self, rank: int) -> Outcome:
        """Wait for a rank."""
        assert self._pipes[rank].poll(WAIT_S), f"rank {rank} hangs"
        try:
            found = self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            return Outcome(ended=True)
        assert isinstance(found, Outcome)
        return found

    def outcomes(self) -> list[Outcome]:
        """Wait for all."""
        return [self.outcome(rank) for rank in range(len(self._pipes))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        left = []
        for rank, process in enumerate(self._processes):
            process.join(WAIT_S if kind is None else 0)
            if process.is_alive():
                left.append(rank)
                process.kill()
                process.join()
        assert kind is not None or left == []
        assert multiprocessing.active_children() == []


def results(size: int, work: Callable[[Seat], object]) -> list[object]:
    """What each rank's work returned, when all did well."""
    with Ranks(size, work) as ranks:
        outcomes = ranks.outcomes()
    assert [outcome.text for outcome in outcomes] == [""] * size
    return [outcome.result for outcome in outcomes]


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of sizes that no number of ranks divides, and several number formats."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"embed": (13, 6), "norm": (7,), "up": (5, 9), "one": (1, 3), "scale": ()}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    tensors["half"] = torch.randn((6, 5), generator=draw).to(torch.bfloat16)
    tensors["ids"] = torch.arange(11)
    return tensors


def sharded(placements: list[Placement], *mesh_shape: int) -> dict[str, DTensor]:
    """The model's tensors in parts, on a mesh of all ranks."""
    mesh = init_device_mesh("cpu", mesh_shape)
    return {
        name: distribute_tensor(tensor, mesh, placements if tensor.dim() else [Replicate()] * len(mesh_shape))
        for name, tensor in model().items()
    }


class Net(torch.nn.Module):
    """A module to be sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(7, 5)
        self.second = torch.nn.Linear(5, 3, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(given)))


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not the same bit for bit, plain and contiguous; or not there at all."""
    return sorted(found.keys() ^ expected.keys()) + [
        name
        for name, tensor in found.items()
        if type(tensor) is not torch.Tensor
        or tensor.dtype != expected[name].dtype
        or not tensor.is_contiguous()
        or not torch.equal(tensor, expected[name])
    ]


class Entry(NamedTuple):
    """An entry of bytes, which notes what becomes of it."""

    entry: bytes
    ends: list[str]
    load_format: str | None
    applied: bool

    def settle(self) -> Settled:
        self.ends.append("settled")
        return Settled(self.applied, f"{len(self.ends)} ended")

    def withdraw(self) -> None:
        self.ends.append("withdrawn")


class Encoder:
    """Encodes a chunk as bytes, and notes in them which rank did, and how often it has."""

    def __init__(self, rank: int, load_format: str | None = None, *, applied: bool = True) -> None:
        self.rank = rank
        self.load_format = load_format
        self.applied = applied
        self.made = 0
        self.ends: list[str] = []

    def __call__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> Entry:
        self.made += 1
        told = [*tensors, ("made by", torch.tensor([self.rank, self.made]))]
        entry = cpu_payload((_spec(*item), _raw(item[1])) for item in told)
        return Entry(entry, self.ends, self.load_format, self.applied)


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec.of(name, from_torch(tensor.dtype) or "", tuple(tensor.shape))


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def decoded(entry: bytes) -> dict[str, torch.Tensor]:
    """The tensors of an entry, and who made it."""
    return dict(pickle.loads(base64.b64decode(entry)))


def gpu(rank: int) -> str:
    """The GPU that a rank says it is on."""
    return f"GPU-{rank:08x}-AA"


def target(*ranks: int, name: str = "server") -> Target:
    """A server whose ranks are on the GPUs of these trainer ranks."""
    return Target(name, tuple(RankPlace(at, gpu(rank).lower()[4:]) for at, rank in enumerate(ranks)))


def push(
    source: GroupSource, targets: Sequence[Target], chunk_bytes_max: int = 1 << 20
) -> list[list[dict[str, torch.Tensor]]]:
    """What each rank of each server receives in one refit, chunk by chunk."""
    received: list[list[dict[str, torch.Tensor]]] = [[{} for _ in server.ranks] for server in targets]
    for chunk in source.plan(PushWish(chunk_bytes_max=chunk_bytes_max)).chunks:
        for server, ranks in zip(targets, received, strict=True):
            offer = source.offer(chunk, server)
            for rank, entry in zip(ranks, offer.entries, strict=True):
                rank.update(decoded(entry))
            assert offer.settle().applied
    return received
