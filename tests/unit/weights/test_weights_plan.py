from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.offer import RankPlace, Target
from refitfsm.weights.plan import (
    MANY_SMALL,
    SMALL_BYTES,
    Form,
    Layout,
    PushWish,
    Strategy,
    choose,
    plan_buckets,
    plan_list,
    plan_mixed,
    plan_registered,
    plan_tensors,
)

manifests = st.lists(st.integers(0, 100), max_size=30).map(
    lambda sizes: Manifest(tuple(TensorSpec.of(f"t{i}", "U8", (size,)) for i, size in enumerate(sizes)))
)


@given(manifests, st.integers(1, 200))
def test_plan_partitions_in_order(manifest: Manifest, limit: int) -> None:
    """Chunks one after the other are the manifest: order kept, each tensor once."""
    chunks = plan_list(manifest, limit).chunks
    assert [name for chunk in chunks for name in chunk.names] == [spec.name for spec in manifest.tensors]
    assert [(chunk.index, chunk.count) for chunk in chunks] == [(i, len(chunks)) for i in range(len(chunks))]
    assert sum(chunk.nbytes for chunk in chunks) == manifest.nbytes


@given(manifests, st.integers(1, 200))
def test_only_a_single_tensor_exceeds_the_limit(manifest: Manifest, limit: int) -> None:
    """A chunk keeps to the limit unless it is one tensor, and knows its own size."""
    for chunk in plan_list(manifest, limit).chunks:
        assert chunk.nbytes == sum(manifest.by_name[name].nbytes for name in chunk.names)
        assert chunk.nbytes <= limit or len(chunk.names) == 1


@given(manifests, st.integers(1, 200))
def test_no_chunk_could_take_the_next_tensor(manifest: Manifest, limit: int) -> None:
    """A chunk ends only where the next tensor would not fit: there are no needless pushes."""
    chunks = plan_list(manifest, limit).chunks
    for chunk, following in pairwise(chunks):
        assert chunk.nbytes + manifest.by_name[following.names[0]].nbytes > limit


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_is_positive(limit: int) -> None:
    """A limit that no tensor could meet is refused."""
    with pytest.raises(WeightsError, match="not positive"):
        plan_list(Manifest(()), limit)


mixed_manifests = st.lists(
    st.tuples(st.sampled_from(("BF16", "F32", "U8")), st.integers(1, 50)), min_size=1, max_size=30
).map(
    lambda drawn: Manifest(
        tuple(TensorSpec.of(f"t{i}", dtype, (size,)) for i, (dtype, size) in enumerate(drawn))
    )
)


@given(mixed_manifests, st.integers(1, 300))
def test_every_plan_pushes_each_tensor_once(manifest: Manifest, limit: int) -> None:
    """However weights are cut, each tensor is in one push, and the pushes are numbered."""
    plans = (
        plan_list(manifest, limit),
        plan_tensors(manifest),
        plan_buckets(manifest, limit),
        plan_mixed(manifest, limit, small_bytes=60),
        plan_registered(manifest),
    )
    for plan in plans:
        names = [name for chunk in plan.chunks for name in chunk.names]
        assert sorted(names) == sorted(manifest.by_name)
        assert [chunk.index for chunk in plan.chunks] == list(range(len(plan.chunks)))
        assert {chunk.count for chunk in plan.chunks} == {len(plan.chunks)}


@given(mixed_manifests, st.integers(1, 300))
def test_a_bucket_has_one_number_format_and_fits_its_buffer(manifest: Manifest, limit: int) -> None:
    """Tensors packed together are of one format, and no bucket is larger than what the plan asks for."""
    for plan in (plan_buckets(manifest, limit), plan_mixed(manifest, limit, small_bytes=60)):
        for chunk in plan.chunks:
            if chunk.form is Form.BUCKET:
                assert len({manifest.by_name[name].dtype for name in chunk.names}) == 1
                assert chunk.nbytes <= min(plan.buffer_bytes)
        assert len(plan.buffer_bytes) <= 2
        assert plan.sender_bytes <= 2 * limit


@given(mixed_manifests)
def test_only_packing_needs_memory(manifest: Manifest) -> None:
    """Plans that leave tensors where they lie ask for no memory."""
    for plan in (plan_list(manifest, 100), plan_tensors(manifest), plan_registered(manifest)):
        assert plan.sender_bytes == 0


def test_mixed_packs_small_tensors_and_leaves_large_ones() -> None:
    """What is below the limit is packed, the rest goes as it lies in one push."""
    manifest = Manifest(tuple(TensorSpec.of(f"t{size}", "U8", (size,)) for size in (10, 200, 20, 300)))
    plan = plan_mixed(manifest, 1000, small_bytes=100)
    assert plan.strategy is Strategy.MIXED
    assert [(chunk.form, chunk.names) for chunk in plan.chunks] == [
        (Form.BUCKET, ("t10", "t20")),
        (Form.LIST, ("t200", "t300")),
    ]


def of_sizes(*sizes: int) -> Manifest:
    return Manifest(tuple(TensorSpec.of(f"t{at}", "U8", (size,)) for at, size in enumerate(sizes)))


MANY = of_sizes(*[1000] * MANY_SMALL, 4 * SMALL_BYTES)
"""As many small tensors as a bucket has to save, 1000 bytes each, and a large one."""
FEW = of_sizes(*[1000] * (MANY_SMALL - 1), SMALL_BYTES)
ROOM = 1000 * MANY_SMALL
THREE = tuple(Target(name, (RankPlace(0, None),)) for name in "abc")


@pytest.mark.parametrize(
    ("manifest", "wish", "layout", "chosen"),
    [
        (MANY, PushWish(loader=True), Layout(), Strategy.REGISTERED),
        (MANY, PushWish(loader=True), Layout(one_allocation=True, free_bytes=ROOM), Strategy.REGISTERED),
        (MANY, PushWish(), Layout(one_allocation=True, free_bytes=ROOM), Strategy.LIST),
        (MANY, PushWish(), Layout(free_bytes=ROOM), Strategy.MIXED),
        (MANY, PushWish(), Layout(free_bytes=ROOM - 1), Strategy.LIST),
        (MANY, PushWish(targets=THREE), Layout(free_bytes=3 * ROOM), Strategy.MIXED),
        (MANY, PushWish(targets=THREE), Layout(free_bytes=3 * ROOM - 1), Strategy.LIST),
        (MANY, PushWish(), Layout(free_bytes=None), Strategy.LIST),
        (FEW, PushWish(), Layout(free_bytes=ROOM), Strategy.LIST),
        (MANY, PushWish(bucket_bytes=ROOM // 2), Layout(free_bytes=ROOM), Strategy.LIST),
        (of_sizes(SMALL_BYTES), PushWish(), Layout(free_bytes=ROOM), Strategy.LIST),
        (Manifest(()), PushWish(), Layout(free_bytes=ROOM), Strategy.LIST),
    ],
)
def test_auto_is_chosen_by_loader_layout_and_free_memory(
    manifest: Manifest, wish: PushWish, layout: Layout, chosen: Strategy
) -> None:
    """A loader comes first, then one handle for all, then buckets that save requests and surely fit."""
    assert choose(manifest, wish, layout) is chosen


def test_a_last_refit_ends_with_a_push_of_nothing() -> None:
    """A plan that is to be forgotten has the weights first, and then a word; nothing has no word."""
    plan = plan_registered(of_sizes(5, 7), forget=True)
    assert [(chunk.form, chunk.names, chunk.nbytes, chunk.count) for chunk in plan.chunks] == [
        (Form.REGISTERED, ("t0", "t1"), 12, 2),
        (Form.FORGET, (), 0, 2),
    ]
    assert plan_registered(Manifest(()), forget=True).chunks == ()
