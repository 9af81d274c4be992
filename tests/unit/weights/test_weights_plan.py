from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.plan import plan_chunks

manifests = st.lists(st.integers(0, 100), max_size=30).map(
    lambda sizes: Manifest(tuple(TensorSpec.of(f"t{i}", "U8", (size,)) for i, size in enumerate(sizes)))
)


@given(manifests, st.integers(1, 200))
def test_plan_partitions_in_order(manifest: Manifest, limit: int) -> None:
    """Chunks one after the other are the manifest: order kept, each tensor once."""
    chunks = plan_chunks(manifest, limit)
    assert [name for chunk in chunks for name in chunk.names] == [spec.name for spec in manifest.tensors]
    assert [(chunk.index, chunk.count) for chunk in chunks] == [(i, len(chunks)) for i in range(len(chunks))]
    assert sum(chunk.nbytes for chunk in chunks) == manifest.nbytes


@given(manifests, st.integers(1, 200))
def test_only_a_single_tensor_exceeds_the_limit(manifest: Manifest, limit: int) -> None:
    """A chunk keeps to the limit unless it is one tensor, and knows its own size."""
    for chunk in plan_chunks(manifest, limit):
        assert chunk.nbytes == sum(manifest.by_name[name].nbytes for name in chunk.names)
        assert chunk.nbytes <= limit or len(chunk.names) == 1


@given(manifests, st.integers(1, 200))
def test_no_chunk_could_take_the_next_tensor(manifest: Manifest, limit: int) -> None:
    """A chunk ends only where the next tensor would not fit: there are no needless pushes."""
    chunks = plan_chunks(manifest, limit)
    for chunk, following in pairwise(chunks):
        assert chunk.nbytes + manifest.by_name[following.names[0]].nbytes > limit


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_is_positive(limit: int) -> None:
    """A limit that no tensor could meet is refused."""
    with pytest.raises(WeightsError, match="not positive"):
        plan_chunks(Manifest(()), limit)
