"""A pickle writer for a handful of values, able to name globals of modules that are not installed.

The standard pickler refuses to name a global that it cannot import. A trainer's machine need not have
torch, and never needs SGLang, so the few opcodes required are written here. Large buffers are kept as
references until the whole is joined: their bytes are copied once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

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
        self._memo: dict[Global, bytes] = {}

    def put(self, value: Value) -> None:
        # By its very type: a list of a model's handles has ten thousand values.
        _PUTS[type(value)](self, value)

    def _put_none(self, _: None) -> None:
        self.pieces.append(b"N")

    def _put_bool(self, value: bool) -> None:
        self.pieces.append(b"\x88" if value else b"\x89")

    def _put_int(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self.pieces.append(b"J" + value.to_bytes(4, "little", signed=True))
        else:
            encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.pieces.append(b"\x8a" + bytes([len(encoded)]) + encoded)

    def _put_str(self, value: str) -> None:
        encoded = value.encode()
        self.pieces.append(b"X" + len(encoded).to_bytes(4, "little") + encoded)

    def _put_bytes(self, value: bytes) -> None:
        self.pieces.append(b"\x8e" + len(value).to_bytes(8, "little") + value)

    def _put_blob(self, value: Blob) -> None:
        nbytes = sum(memoryview(piece).nbytes for piece in value.pieces)
        self.pieces.append(b"\x8e" + nbytes.to_bytes(8, "little"))
        self.pieces.extend(value.pieces)

    def _put_list(self, values: "list[Value]") -> None:
        self._put_many(b"](", values, b"e")

    def _put_dict(self, values: "dict[str, Value]") -> None:
        self._put_many(b"}(", (part for item in values.items() for part in item), b"u")

    def _put_tuple(self, values: "tuple[Value, ...]") -> None:
        closing = _SMALL_TUPLES.get(len(values))
        if closing is None:
            self._put_many(b"(", values, b"t")
        else:
            self._put_many(b"", values, closing)

    def _put_global(self, value: Global) -> None:
        # Readers resolve a global by name each time, so later uses refer to the first.
        known = self._memo.get(value)
        if known is None:
            slot = bytes([len(self._memo)])
            self._memo[value] = b"h" + slot
            known = f"c{value.module}\n{value.name}\n".encode() + b"q" + slot
        self.pieces.append(known)

    def _put_call(self, value: Call) -> None:
        self._put_global(value.function)
        self._put_tuple(value.args)
        self.pieces.append(b"R")

    def _put_persistent_id(self, value: PersistentId) -> None:
        self._put_many(b"", (value.identifier,), b"Q")

    def _put_many(self, opening: bytes, values: "Iterable[Value]", closing: bytes) -> None:
        self.pieces.append(opening)
        for value in values:
            _PUTS[type(value)](self, value)
        self.pieces.append(closing)


_PUTS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _Writer._put_none,  # noqa: SLF001 - its own table
    bool: _Writer._put_bool,  # noqa: SLF001
    int: _Writer._put_int,  # noqa: SLF001
    str: _Writer._put_str,  # noqa: SLF001
    bytes: _Writer._put_bytes,  # noqa: SLF001
    Blob: _Writer._put_blob,  # noqa: SLF001
    list: _Writer._put_list,  # noqa: SLF001
    dict: _Writer._put_dict,  # noqa: SLF001
    tuple: _Writer._put_tuple,  # noqa: SLF001
    Global: _Writer._put_global,  # noqa: SLF001
    Call: _Writer._put_call,  # noqa: SLF001
    PersistentId: _Writer._put_persistent_id,  # noqa: SLF001
}
