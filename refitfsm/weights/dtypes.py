"""Number formats, by their safetensors names, and what torch calls them."""

from math import prod
from typing import NamedTuple

from refitfsm.weights.errors import WeightsError


class DType(NamedTuple):
    """One number format."""

    bits: int
    """Width of an element; safetensors packs narrower ones without gaps."""
    torch_name: str | None
    """`X` of `torch.X`, or None where one torch element is not one safetensors element."""
    storage: str | None
    """The torch class a pickled storage of it is loaded as; None for those torch has no class for."""


DTYPES: dict[str, DType] = {
    "F64": DType(64, "float64", "DoubleStorage"),
    "F32": DType(32, "float32", "FloatStorage"),
    "F16": DType(16, "float16", "HalfStorage"),
    "BF16": DType(16, "bfloat16", "BFloat16Storage"),
    "I64": DType(64, "int64", "LongStorage"),
    "I32": DType(32, "int32", "IntStorage"),
    "I16": DType(16, "int16", "ShortStorage"),
    "I8": DType(8, "int8", "CharStorage"),
    "U8": DType(8, "uint8", "ByteStorage"),
    "BOOL": DType(8, "bool", "BoolStorage"),
    "C64": DType(64, "complex64", "ComplexFloatStorage"),
    "U64": DType(64, "uint64", None),
    "U32": DType(32, "uint32", None),
    "U16": DType(16, "uint16", None),
    "F8_E4M3": DType(8, "float8_e4m3fn", None),
    "F8_E5M2": DType(8, "float8_e5m2", None),
    "F8_E4M3FNUZ": DType(8, "float8_e4m3fnuz", None),
    "F8_E5M2FNUZ": DType(8, "float8_e5m2fnuz", None),
    "F8_E8M0": DType(8, "float8_e8m0fnu", None),
    "F6_E2M3": DType(6, None, None),
    "F6_E3M2": DType(6, None, None),
    "F4": DType(4, None, None),
}

_BY_TORCH_NAME = {entry.torch_name: name for name, entry in DTYPES.items() if entry.torch_name}


def from_torch(dtype: object) -> str | None:
    """The safetensors name of a `torch.dtype`, or None if safetensors has none."""
    return _BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor.

    Raises:
        WeightsError: unknown format, a negative dimension, or a size that is no whole number of bytes.
    """
    entry = DTYPES.get(dtype)
    if entry is None:
        raise WeightsError(f"unknown number format {dtype!r}: use one of {', '.join(DTYPES)}")
    if any(size < 0 for size in shape):
        raise WeightsError(f"shape {list(shape)} has a negative dimension")
    bits = entry.bits * prod(shape)
    if bits % 8:
        raise WeightsError(f"{dtype} of shape {list(shape)} does not fill whole bytes")
    return bits // 8
