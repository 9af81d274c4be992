"""Where new weights come from, as a driver sees it."""

import threading
from typing import NamedTuple, Protocol

from refitfsm.weights.manifest import Manifest
from refitfsm.weights.payload import check_sendable, cpu_payload
from refitfsm.weights.plan import ChunkPlan, plan_chunks
from refitfsm.weights.safetensors import CheckpointFolder


class RankPlace(NamedTuple):
    """One tensor-parallel rank of a server, as far as it is known."""

    tp_rank: int
    gpu_uuid: str | None
    """The rank's GPU, with or without `GPU-` in front, or None if unknown."""


class WeightSource(Protocol):
    """Named tensors, ready to be pushed to any number of servers.

    The tensors must not change from the first `payloads` of a refit until the last server has answered
    the last push. Methods may be called from several threads.
    """

    @property
    def manifest(self) -> Manifest:
        """What is pushed, in order."""
        ...

    @property
    def load_format(self) -> str | None:
        """SGLang's `load_format` of these payloads; None is its default, a list of named tensors."""
        ...

    def chunks(self, chunk_bytes_max: int) -> tuple[ChunkPlan, ...]:
        """The pushes of one refit: at most `chunk_bytes_max` bytes of tensor data each, or one larger tensor.

        Raises:
            WeightsError: the limit is not positive.
        """
        ...

    def payloads(self, chunk: ChunkPlan, ranks: tuple[RankPlace, ...]) -> tuple[bytes, ...]:
        """The entries of `serialized_named_tensors` for one push to one server, one for each rank, in order.

        Each is base64 as ASCII bytes. Ask anew for each server and each attempt: an entry may name memory
        of this process that can be handed over once.

        Raises:
            WeightsError: a tensor cannot be sent, or not to these ranks.
        """
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

    load_format: str | None = None

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

    def chunks(self, chunk_bytes_max: int) -> tuple[ChunkPlan, ...]:
        """See `WeightSource.chunks`."""
        return plan_chunks(self.manifest, chunk_bytes_max)

    def payloads(self, chunk: ChunkPlan, ranks: tuple[RankPlace, ...]) -> tuple[bytes, ...]:
        """See `WeightSource.payloads`. The entries are one object, so ranks cost nothing."""
        # Held while encoding: whoever comes second for the same chunk waits and shares the result.
        with self._lock:
            if self._last is None or self._last[0] != chunk:
                self._last = None  # frees the old encoding before the new one is made
                self._last = (chunk, self._encode(chunk))
            return (self._last[1],) * len(ranks)

    def _encode(self, chunk: ChunkPlan) -> bytes:
        by_name = self.manifest.by_name
        return cpu_payload((by_name[name], self._folder.tensor(name)) for name in chunk.names)

    def close(self) -> None:
        """Forget the kept encoding and close the folder. Idempotent."""
        with self._lock:
            self._last = None
        self._folder.close()
