"""Offers of one flat tensor that holds many: SGLang's `flattened_bucket`, one handle for all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from refitfsm.weights.handles import LentOffer, Replica, encoded
from refitfsm.weights.lending import Ledger, lending
from refitfsm.weights.offer import Target
from refitfsm.weights.opcodes import Call, Global, Value

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "flattened_bucket"
_FLAT = "flattened_tensor"
_METADATA = Global("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")


class Flat(NamedTuple):
    """Tensors of one number format, one after another in a flat one."""

    tensor: "torch.Tensor"
    """One dimension, of their number format."""
    parts: "Sequence[tuple[str, torch.Tensor]]"
    starts: Sequence[int]
    """Where each begins, in elements."""


def flat_offer(
    target: Target, replicas: Sequence[Replica], flats: Sequence[Flat], ledger: Ledger
) -> LentOffer:
    """One flat tensor for each rank, which lies in the rank's replica's memory.

    Raises:
        WeightsError: memory cannot be shared.
    """
    entries = []
    with lending(target) as lease:
        for replica, flat in zip(replicas, flats, strict=True):
            lent = replica.memory.lend({_FLAT: flat.tensor})
            lease.add(lent.counters)
            entries.append(encoded({_FLAT: lent.values[_FLAT], "metadata": _metadata(flat)}))
    places = [replica.memory for replica in replicas]
    return LentOffer(tuple(entries), LOAD_FORMAT, lease, ledger, places=places)


def in_place(tensors: "Sequence[tuple[str, torch.Tensor]]") -> Flat | None:
    """The allocation that all tensors are views of, as one flat tensor; None if there is no such one.

    A server then opens one handle instead of one for each tensor.
    """
    first = tensors[0][1]
    storage = first.untyped_storage()
    for _, tensor in tensors:
        if tensor.dtype != first.dtype or tensor.untyped_storage().data_ptr() != storage.data_ptr():
            return None
    starts = [tensor.storage_offset() for _, tensor in tensors]
    begin = min(starts)
    end = max(start + tensor.numel() for start, (_, tensor) in zip(starts, tensors, strict=True))
    flat = first.detach().as_strided((end - begin,), (1,), begin)
    return Flat(flat, tensors, [start - begin for start in starts])


def _metadata(flat: Flat) -> list[Value]:
    """Offsets in elements of the flat tensor's own format: read alike by every version (0.5.2 on)."""
    dtype = Global("torch", str(flat.tensor.dtype).removeprefix("torch."))
    return [
        Call(
            _METADATA,
            (
                name,
                Call(Global("torch", "Size"), (tuple(tensor.shape),)),
                dtype,
                start,
                start + tensor.numel(),
                tensor.numel(),
            ),
        )
        for (name, tensor), start in zip(flat.parts, flat.starts, strict=True)
    ]
