"""Where new weights come from, as a driver sees it."""

import threading
from typing import Protocol, runtime_checkable

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest
from refitfsm.weights.offer import BytesOffer, Offer, Target
from refitfsm.weights.payload import check_sendable, cpu_payload
from refitfsm.weights.plan import ChunkPlan, PushPlan, PushWish, Strategy, plan_list, plan_tensors
from refitfsm.weights.safetensors import CheckpointFolder


@runtime_checkable
class WeightSource(Protocol):
    """Named tensors, ready to be pushed to any number of servers.

    The tensors must not change from the first `offer` of a refit until the last server has settled the
    last push. Methods may be called from several threads.
    """

    @property
    def manifest(self) -> Manifest:
        """What is pushed, in order."""
        ...

    def plan(self, wish: PushWish) -> PushPlan:
        """The pushes of one refit.

        Raises:
            WeightsError: these tensors cannot be pushed so, or the sender lacks the memory for it.
        """
        ...

    def offer(self, chunk: ChunkPlan, target: Target) -> Offer:
        """What one push carries to one server. Ask anew for each server and each attempt.

        Raises:
            WeightsError: a tensor cannot be sent, or not to these ranks.
        """
        ...

    def release(self) -> None:
        """Free what only the refit that has ended needed. Idempotent."""
        ...

    def close(self) -> None:
        """Let go of the tensors, once no server can still read them. Idempotent."""
        ...


class CheckpointSource:
    """The weights of a safetensors checkpoint. Every rank of every server gets the same bytes.

    The last chunk's encoding is kept, so that servers pushed side by side share it. At its peak an
    encoding takes 2.4 times the chunk's bytes, and what is kept 1.4 times.

    Raises:
        WeightsError: a tensor of the checkpoint cannot be sent.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        for spec in folder.manifest.tensors:
            check_sendable(spec)
        self._folder = folder
        self._lock = threading.Lock()
        self._last: tuple[ChunkPlan, bytes] | None = None

    @property
    def manifest(self) -> Manifest:
        """What the checkpoint holds, in the order of its files."""
        return self._folder.manifest

    def plan(self, wish: PushWish) -> PushPlan:
        """See `WeightSource.plan`. A folder's bytes are in no memory that a server could map."""
        self._folder.require_open()
        match wish.strategy:
            case Strategy.AUTO | Strategy.LIST:
                return plan_list(self.manifest, wish.chunk_bytes_max)
            case Strategy.TENSOR:
                return plan_tensors(self.manifest)
        raise WeightsError(
            f"push_strategy = {wish.strategy} needs weights in memory: use list for a checkpoint's files"
        )

    def offer(self, chunk: ChunkPlan, target: Target) -> BytesOffer:
        """See `WeightSource.offer`. The entries are one object, so ranks cost nothing."""
        # Held while encoding: whoever comes second for the same chunk waits and shares the result.
        with self._lock:
            if self._last is None or self._last[0] != chunk:
                self._last = None  # frees the old encoding before the new one is made
                self._last = (chunk, self._encode(chunk))
            return BytesOffer((self._last[1],) * len(target.ranks))

    def _encode(self, chunk: ChunkPlan) -> bytes:
        by_name = self.manifest.by_name
        return cpu_payload((by_name[name], self._folder.tensor(name)) for name in chunk.names)

    def release(self) -> None:
        """See `WeightSource.release`: the kept encoding."""
        with self._lock:
            self._last = None

    def close(self) -> None:
        """See `WeightSource.close`: the folder, too."""
        self.release()
        self._folder.close()
