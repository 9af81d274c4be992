"""Offers of tensors packed into a buffer: SGLang's `flattened_bucket`.

Each server has buffers of its own, used in turn. While it reads one, the next bucket is copied into
another, whose bucket before it has given back; where there is only one, it is filled between two pushes.
"""

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.flat import Flat, flat_offer
from refitfsm.weights.handles import LentOffer, Replica, replica_of, synchronize
from refitfsm.weights.lending import Ledger
from refitfsm.weights.offer import Target
from refitfsm.weights.plan import ChunkPlan, Form, PushPlan

if TYPE_CHECKING:
    import torch


class _Side(NamedTuple):
    """A rank's buffers: of one replica, for one server."""

    replica: Replica
    buffers: "tuple[torch.Tensor, ...]"


class Buckets:
    """The buffers of a plan, and what is in them.

    Raises:
        WeightsError: there is no room for them. Nothing was sent.
    """

    def __init__(self, plan: PushPlan, replicas: Sequence[Replica], ledger: Ledger, readers: int) -> None:
        self._chunks = [chunk for chunk in plan.chunks if chunk.form is Form.BUCKET]
        self._at = {chunk.index: at for at, chunk in enumerate(self._chunks)}
        self._sizes = plan.buffer_bytes
        self._replicas = replicas
        self._ledger = ledger
        self._lock = threading.Lock()
        self._spare = {
            replica.memory.place: [self._allocate(replica) for _ in range(readers)] for replica in replicas
        }
        self._sides: dict[str, tuple[_Side, ...]] = {}
        self._packed: dict[str, int] = {}
        """Of each server, the last chunk that is in its buffer or on the way there."""

    def _allocate(self, replica: Replica) -> "tuple[torch.Tensor, ...]":
        return tuple(replica.memory.empty(size) for size in self._sizes)

    def offer(self, chunk: ChunkPlan, target: Target) -> LentOffer:
        """The bucket of a chunk for each rank of a server; the next one is packed meanwhile.

        Raises:
            WeightsError: see `replica_of`; or memory cannot be shared.
        """
        sides = self._sides_of(target)
        at = self._at.get(chunk.index, -1)
        if at < 0 or self._chunks[at] != chunk:
            raise WeightsError("this source was planned anew meanwhile: use a source in one fleet at a time")
        if self._packed.get(target.server) != at:
            self._pack(sides, at)
        synchronize([side.replica for side in sides])
        flats = [_flat(side.buffers[at % len(side.buffers)], chunk, side.replica) for side in sides]
        offer = flat_offer(target, [side.replica for side in sides], flats, self._ledger)
        if len(self._sizes) > 1 and at + 1 < len(self._chunks):
            # The other buffers have come back: a chunk is asked for when the one before it was settled.
            self._pack(sides, at + 1)
            self._packed[target.server] = at + 1
        return offer

    def _sides_of(self, target: Target) -> tuple[_Side, ...]:
        with self._lock:
            sides = self._sides.get(target.server)
            if sides is None:
                chosen = [replica_of(self._replicas, rank) for rank in target.ranks]
                by_place = {replica.memory.place: replica for replica in chosen}
                taken = {place: self._take(replica) for place, replica in by_place.items()}
                sides = tuple(_Side(replica, taken[replica.memory.place]) for replica in chosen)
                self._sides[target.server] = sides
        return sides

    def _take(self, replica: Replica) -> "tuple[torch.Tensor, ...]":
        spare = self._spare[replica.memory.place]
        return spare.pop() if spare else self._allocate(replica)

    def _pack(self, sides: Sequence[_Side], at: int) -> None:
        """Begin to copy a chunk into its buffer. On a GPU this returns before it is done."""
        import torch  # noqa: PLC0415 - the package must import without torch

        chunk = self._chunks[at]
        for side in {side.replica.memory.place: side for side in sides}.values():
            sources = [side.replica.tensors[name].detach().view(-1) for name in chunk.names]
            flat = _flat(side.buffers[at % len(side.buffers)], chunk, side.replica).tensor
            with torch.no_grad():
                torch._foreach_copy_(list(flat.split([item.numel() for item in sources])), sources)


def _flat(buffer: "torch.Tensor", chunk: ChunkPlan, replica: Replica) -> Flat:
    tensors = [(name, replica.tensors[name]) for name in chunk.names]
    ends = list(accumulate(tensor.numel() for _, tensor in tensors))
    return Flat(buffer[: chunk.nbytes].view(tensors[0][1].dtype), tensors, [0, *ends[:-1]])


def require_room(plan: PushPlan, replicas: Sequence[Replica], readers: int) -> None:
    """Refuse a plan whose buffers do not fit, before it begins.

    Raises:
        WeightsError: the message says what is needed and what is free.
    """
    needed = plan.sender_bytes * readers
    for replica in replicas:
        free = replica.memory.free_bytes()
        if free is not None and needed > free:
            raise WeightsError(
                f"{plan.strategy} needs {needed:,} bytes of buffers on GPU {replica.memory.place}, where"
                f" {free:,} are free: set a smaller bucket_bytes, or push_strategy = list, which needs none"
            )
