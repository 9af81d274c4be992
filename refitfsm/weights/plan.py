"""Cutting a manifest into pushes of a bounded size."""

from collections.abc import Iterator
from dataclasses import dataclass

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The tensors of one push."""

    index: int
    """From 0."""
    count: int
    """How many chunks the whole push has."""
    names: tuple[str, ...]
    nbytes: int
    """Bytes of tensor data, before any encoding."""


def plan_chunks(manifest: Manifest, chunk_bytes_max: int) -> tuple[ChunkPlan, ...]:
    """Cut a manifest into chunks of at most `chunk_bytes_max` bytes of tensor data.

    The order of the tensors is kept and each is in exactly one chunk. A tensor larger than the limit is
    a chunk of its own: SGLang takes whole tensors only. An empty manifest has no chunks.

    Raises:
        WeightsError: the limit is not positive.
    """
    if chunk_bytes_max <= 0:
        raise WeightsError(f"a chunk limit of {chunk_bytes_max} bytes is not positive: give at least 1")
    groups = list(_groups(manifest, chunk_bytes_max))
    return tuple(
        ChunkPlan(index, len(groups), tuple(spec.name for spec in group), sum(spec.nbytes for spec in group))
        for index, group in enumerate(groups)
    )


def _groups(manifest: Manifest, limit: int) -> Iterator[list[TensorSpec]]:
    group: list[TensorSpec] = []
    nbytes = 0
    for spec in manifest.tensors:
        if group and nbytes + spec.nbytes > limit:
            yield group
            group, nbytes = [], 0
        group.append(spec)
        nbytes += spec.nbytes
    if group:
        yield group
