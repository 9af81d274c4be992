import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitfsm.weights.dtypes import DTYPES, from_torch, size_bytes
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec

specs = st.builds(
    TensorSpec.of,
    st.sampled_from("abcdef"),
    st.sampled_from(["F32", "BF16", "U8"]),
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
manifests = st.lists(specs, max_size=6, unique_by=lambda spec: spec.name).map(tuple).map(Manifest)


def test_manifest_refuses_a_name_given_twice() -> None:
    """Each name is in a manifest once."""
    spec = TensorSpec.of("w", "F32", (2,))
    with pytest.raises(WeightsError, match=r"^tensor 'w' is given twice"):
        Manifest((spec, TensorSpec.of("v", "F32", (2,)), spec))


@given(manifests, manifests)
def test_no_differences_means_equal_digests(found: Manifest, expected: Manifest) -> None:
    """Two manifests have no differences exactly when their digests are equal."""
    assert (found.differences(expected) == ()) == (found.digest == expected.digest)


@given(manifests, st.randoms(use_true_random=False))
def test_digest_ignores_order(manifest: Manifest, random) -> None:
    """The digest names a set of tensors, whatever their order."""
    shuffled = list(manifest.tensors)
    random.shuffle(shuffled)
    assert Manifest(tuple(shuffled)).digest == manifest.digest


@given(manifests)
def test_nbytes_is_the_sum(manifest: Manifest) -> None:
    """A manifest weighs what its tensors weigh."""
    assert manifest.nbytes == sum(size_bytes(spec.dtype, spec.shape) for spec in manifest.tensors)


@given(manifests, manifests)
def test_each_difference_is_one_sentence(found: Manifest, expected: Manifest) -> None:
    """A difference reads as one plain sentence that names its tensor."""
    for difference in found.differences(expected):
        text = str(difference)
        assert repr(difference.name) in text
        assert text.endswith(".")
        assert "\n" not in text


def test_differences_say_what_and_in_which_order() -> None:
    """Departures come in the expected order with both values; unexpected tensors come last."""
    found = Manifest(
        (
            TensorSpec.of("extra", "I8", (3,)),
            TensorSpec.of("b", "F16", (2,)),
            TensorSpec.of("c", "F32", (2, 1)),
        )
    )
    expected = Manifest(tuple(TensorSpec.of(name, "F32", (2,)) for name in "abc"))
    assert [str(difference) for difference in found.differences(expected)] == [
        "Tensor 'a' is missing: F32 [2] was expected.",
        "Tensor 'b' has dtype F16, and F32 was expected.",
        "Tensor 'c' has shape [2, 1], and [2] was expected.",
        "Tensor 'extra' was not expected: it is I8 [3].",
    ]


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [("F33", (1,), "unknown number format"), ("F32", (2, -1), "negative"), ("F4", (3,), "whole bytes")],
)
def test_impossible_specs_are_refused(dtype: str, shape: tuple[int, ...], reason: str) -> None:
    """A spec has a known format and a size in whole bytes, or the error names the tensor."""
    with pytest.raises(WeightsError, match=rf"^tensor 'w': .*{reason}"):
        TensorSpec.of("w", dtype, shape)


def test_torch_names_lead_back() -> None:
    """Every format that torch has is found by its torch name, and no other name is."""
    for name, entry in DTYPES.items():
        if entry.torch_name is not None:
            assert from_torch(f"torch.{entry.torch_name}") == name
    assert from_torch("torch.quint8") is None
