"""What a rank does at an order, the leader's own rank like the others."""

import contextlib
from typing import TYPE_CHECKING

import msgspec

from refitfsm.weights.gather import Gatherer
from refitfsm.weights.group_base import Encode, LocalEntry
from refitfsm.weights.group_board import Do, Order, Report

if TYPE_CHECKING:
    import torch


class LocalRank:
    """One rank's tensors, the chunk of them that is whole just now, and the entries that are not settled."""

    def __init__(self, rank: int, weights: Gatherer, encode: Encode) -> None:
        self.rank = rank
        self.weights = weights
        self._encode = encode
        self._names: tuple[str, ...] = ()
        self._chunk: list[tuple[str, torch.Tensor]] | None = None
        self._open: dict[int, LocalEntry] = {}

    def act(self, order: Order, names: tuple[str, ...]) -> tuple[Report, bytes]:
        """Carry out an order; `names` come with `READY`. The report, and the entry if one was made.

        Raises:
            Exception: whatever gathering, the encoder or its entry raises.
        """
        report = Report(epoch=order.epoch, seq=order.seq)
        with self.weights.here():
            match order.do:
                case Do.JOIN:
                    gpu, digest = bare(self.weights.gpu_uuid), self.weights.manifest.digest
                    return msgspec.structs.replace(report, gpu=gpu, digest=digest), b""
                case Do.READY:
                    self._chunk = None  # before the next one is gathered, not after
                    self.weights.require(names)
                    self._names = names
                case Do.MAKE:
                    return self._make(order, report)
                case Do.SETTLE:
                    settled = self._open[order.offer].settle()
                    del self._open[order.offer]
                    return msgspec.structs.replace(report, applied=settled.applied, note=settled.note), b""
                case Do.WITHDRAW:
                    self._open.pop(order.offer).withdraw()
        return report, b""

    def _make(self, order: Order, report: Report) -> tuple[Report, bytes]:
        if self._chunk is None:
            self._chunk = self.weights.full(self._names)
        if self.rank not in order.makers:
            return report, b""
        made = self._encode(self._chunk)
        self._open[order.offer] = made
        load_format, size = made.load_format, len(made.entry)
        return msgspec.structs.replace(report, load_format=load_format, entry_bytes=size), made.entry

    def drop(self) -> None:
        """Let go of everything. Idempotent."""
        self._chunk = None
        while self._open:
            _, entry = self._open.popitem()
            # The refit is over: why it is has been said, and nobody is left to hear of more.
            with contextlib.suppress(Exception), self.weights.here():
                entry.withdraw()


def bare(uuid: str | None) -> str | None:
    """A GPU's UUID as it can be compared: without `GPU-` in front, in small letters."""
    return None if uuid is None else uuid.strip().lower().removeprefix("gpu-")
