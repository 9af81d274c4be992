"""The numbers in a tensor's bytes, as far as the simulator has to know them: to read them back."""

import math
import struct
from collections.abc import Iterable
from typing import Final

_FORMATS: Final = {"F16": "e", "F32": "f", "F64": "d", "I8": "b", "U8": "B", "I32": "i", "I64": "q"}
_FLOATS: Final = ("BF16", "F16", "F32", "F64")


def unpacked(dtype: str, data: bytes) -> list[float]:
    """The numbers in little-endian bytes; none for a dtype that is not read here."""
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(0, len(data) - 1, 2)]
    code = _FORMATS.get(dtype)
    if code is None:
        return []
    count = len(data) // struct.calcsize(f"<{code}")
    return [float(value) for value in struct.unpack_from(f"<{count}{code}", data)]


def packed(dtype: str, values: Iterable[float]) -> bytes:
    """The nearest numbers of a floating dtype; nothing for another."""
    if dtype not in _FLOATS:
        return b""
    return b"".join(_packed(dtype, value) for value in values)


def _packed(dtype: str, value: float) -> bytes:
    code = "<f" if dtype == "BF16" else f"<{_FORMATS[dtype]}"
    try:
        raw = struct.pack(code, value)
    except OverflowError:
        raw = struct.pack(code, math.copysign(math.inf, value))
    if dtype != "BF16":
        return raw
    (bits,) = struct.unpack("<I", raw)
    if math.isfinite(value):  # to the nearest, ties to even
        bits += 0x7FFF + (bits >> 16 & 1)
    return struct.pack("<H", bits >> 16 & 0xFFFF)
