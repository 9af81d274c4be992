"""A pickle writer for a handful of values, able to name globals of modules that are not installed.

The standard pickler refuses to name a global that it cannot import. A trainer's machine need not have
torch, and never needs SGLang, so the few opcodes required are written here. Large buffers are kept as
references until the whole is joined: their bytes are copied once.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Global:
    """`module.name` on the reading side."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The result of calling a global on the reading side."""

    function: Global
    args: "tuple[Value, ...]"


@dataclass(frozen=True, slots=True)
class Blob:
    """One bytes object on the reading side, in pieces on this one."""

    pieces: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class PersistentId:
    """An object that the reader looks up by this identifier."""

    identifier: "Value"


Value: TypeAlias = (
    "bool | int | str | bytes | list[Value] | tuple[Value, ...] | dict[str, Value]"
    " | Global | Call | Blob | PersistentId | None"
)

_SMALL_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


def pickle_pieces(value: Value, protocol: int = 4) -> list[Buffer]:
    """A pickle of `value`, as pieces to be joined.

    Protocol 2 serves readers that know only its opcodes; `bytes` and `Blob` need protocol 4.
    """
    writer = _Writer()
    writer.put(value)
    return [b"\x80" + bytes([protocol]), *writer.pieces, b"."]


class _Writer:
    def __init__(self) -> None:
        self.pieces: list[Buffer] = []
        self._memo: dict[Global, int] = {}

    def put(self, value: Value) -> None:
        match value:
            case None | bool() | int() | str():
                self.pieces.append(_scalar(value))
            case bytes():
                self._put_bytes((value,))
            case Blob(pieces):
                self._put_bytes(pieces)
            case list():
                self._put_many(b"](", value, b"e")
            case dict():
                self._put_many(b"}(", (part for item in value.items() for part in item), b"u")
            case tuple():
                self._put_tuple(value)
            case Global():
                self._put_global(value)
            case Call(function, args):
                self._put_many(b"", (function, args), b"R")
            case PersistentId(identifier):
                self._put_many(b"", (identifier,), b"Q")

    def _put_many(self, opening: bytes, values: "Iterable[Value]", closing: bytes) -> None:
        self.pieces.append(opening)
        for value in values:
            self.put(value)
        self.pieces.append(closing)

    def _put_tuple(self, value: "tuple[Value, ...]") -> None:
        closing = _SMALL_TUPLES.get(len(value))
        if closing is None:
            self._put_many(b"(", value, b"t")
        else:
            self._put_many(b"", value, closing)

    def _put_bytes(self, pieces: tuple[Buffer, ...]) -> None:
        self.pieces.append(b"\x8e" + struct.pack("<Q", sum(memoryview(piece).nbytes for piece in pieces)))
        self.pieces.extend(pieces)

    def _put_global(self, value: Global) -> None:
        # Readers resolve a global by name each time, so later uses refer to the first.
        slot = self._memo.get(value)
        if slot is not None:
            self.pieces.append(b"h" + bytes([slot]))
            return
        self._memo[value] = slot = len(self._memo)
        self.pieces.append(f"c{value.module}\n{value.name}\n".encode() + b"q" + bytes([slot]))


def _scalar(value: bool | int | str | None) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return _integer(value)
        case str():
            encoded = value.encode()
            return b"X" + struct.pack("<I", len(encoded)) + encoded


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded
