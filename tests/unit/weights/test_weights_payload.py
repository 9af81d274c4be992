from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_payload_reader import STRICT, globals_of, read, read_pickle

from refitfsm.weights.dtypes import DTYPES
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.opcodes import Blob, pickle_pieces
from refitfsm.weights.payload import cpu_payload

VECTORS = Path(__file__).parents[2] / "data" / "payloads"
SENDABLE = [name for name, entry in DTYPES.items() if entry.torch_name is not None]
WITH_STORAGE = [name for name in SENDABLE if DTYPES[name].storage is not None]

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def filled(spec: TensorSpec) -> bytes:
    return bytes(i % 2 if spec.dtype == "BOOL" else i % 256 for i in range(spec.nbytes))


@given(
    st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.sampled_from(SENDABLE), shapes), max_size=5)
)
def test_payload_carries_names_shapes_and_bytes(tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """A reader gets every tensor in order, with its own bytes, row-major, on the CPU, needing no gradient."""
    specs = [TensorSpec.of(*tensor) for tensor in tensors]
    found = read(cpu_payload((spec, filled(spec)) for spec in specs))
    assert [name for name, _ in found] == [spec.name for spec in specs]
    for spec, (_, tensor) in zip(specs, found, strict=True):
        assert (tensor.shape, tensor.offset, tensor.requires_grad) == (spec.shape, 0, False)
        assert (tensor.storage.data, tensor.storage.location) == (filled(spec), "cpu")
        assert tensor.strides == tuple(prod(spec.shape[at + 1 :]) for at in range(len(spec.shape)))


@pytest.mark.parametrize("dtype", WITH_STORAGE)
def test_payload_is_what_torch_writes(dtype: str) -> None:
    """Torch's own pickle of a tensor and ours ask a reader for the same thing."""
    theirs = read_pickle((VECTORS / f"weights_{dtype}.pickle").read_bytes())
    spec = TensorSpec.of("w", dtype, (2, 3))
    assert read(cpu_payload([(spec, filled(spec))])) == theirs


@pytest.mark.parametrize("dtype", sorted(set(SENDABLE) - set(WITH_STORAGE)))
def test_formats_without_a_storage_class_travel_as_bytes(dtype: str) -> None:
    """Float8 and unsigned words are a byte storage and the name of their torch dtype."""
    spec = TensorSpec.of("w", dtype, (2, 3))
    ((_, tensor),) = read(cpu_payload([(spec, filled(spec))]))
    assert (tensor.storage.cls, tensor.storage.numel) == ("torch.ByteStorage", spec.nbytes)
    assert tensor.dtype == f"torch.{DTYPES[dtype].torch_name}"


@pytest.mark.parametrize("dtype", SENDABLE)
def test_payload_names_only_what_sglang_takes(dtype: str) -> None:
    """Every global of a payload is on SGLang's strict list; in module torch it is a dtype."""
    spec = TensorSpec.of("w", dtype, (3,))
    for module, name in globals_of(cpu_payload([(spec, filled(spec))])) - STRICT:
        assert module == "torch"
        assert name == DTYPES[dtype].torch_name


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_buffer_will_do(wrap) -> None:
    """The same bytes give the same payload from any kind of buffer."""
    spec = TensorSpec.of("w", "F32", (2,))
    assert cpu_payload([(spec, wrap(b"\1" * 8))]) == cpu_payload([(spec, b"\1" * 8)])


@pytest.mark.parametrize(
    ("spec", "data", "reason"),
    [
        (TensorSpec.of("w", "F32", (0, 3)), b"", "has no elements"),
        (TensorSpec.of("w", "F4", (2,)), b"\0", "no equal in torch"),
        (TensorSpec.of("w", "F32", (2,)), b"\0" * 7, "7 bytes were given"),
    ],
)
def test_what_cannot_be_sent_is_refused(spec: TensorSpec, data: bytes, reason: str) -> None:
    """Empty tensors, formats unknown to torch and wrong sizes are refused, by the tensor's name."""
    with pytest.raises(WeightsError, match=rf"^tensor 'w'.*{reason}"):
        cpu_payload([(spec, data)])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text("abc"), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values, st.sampled_from([2, 4]))
def test_written_values_are_read_back(value: object, protocol: int) -> None:
    """Python's own unpickler reads back what was written."""
    found = read_pickle(b"".join(pickle_pieces(value, protocol)))
    assert found == value
    assert repr(found) == repr(value)  # 1 is not True


@given(st.lists(st.binary(max_size=5), max_size=4))
def test_pieces_of_a_blob_are_one_bytes_object(pieces: list[bytes]) -> None:
    """A blob arrives as its pieces joined."""
    assert read_pickle(b"".join(pickle_pieces(Blob(tuple(pieces))))) == b"".join(pieces)


def test_large_buffers_are_not_copied() -> None:
    """Until the pieces are joined, a buffer is referred to, not copied."""
    data = bytearray(1 << 16)
    assert any(piece is data for piece in pickle_pieces(Blob((b"head", data))))
