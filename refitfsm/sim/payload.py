"""Decodes `serialized_named_tensors`: base64, pickle, list or bucket, to named contents.

Decoding is a pure function of the entry, and many servers are sent the same entry, so the last few
results are kept.
"""

import base64
import binascii
from collections import OrderedDict
from math import prod
from typing import Final, Generic, TypeVar

from refitfsm.sim.content import DTYPE_BYTES, TensorSpec, spec_of
from refitfsm.sim.tensors import Dtype, Tensor, Undecodable
from refitfsm.sim.unpickle import Metadata, PerRank, load_payload

K = TypeVar("K")
V = TypeVar("V")

NamedSpecs = tuple[tuple[str, TensorSpec], ...]
MAX_PICKLE_PROTOCOL: Final = 5


class Lru(Generic[K, V]):
    """The most recently used results, bounded by their number and by a total weight."""

    def __init__(self, entries: int, weight: int) -> None:
        self._entries = entries
        self._weight = weight
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._total = 0

    def get(self, key: K) -> V | None:
        """What was put under this key, if it is still here."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, weight: int) -> None:
        """Keep a result; what is too heavy on its own is not kept."""
        if weight > self._weight or key in self._held:
            return
        self._held[key] = (value, weight)
        self._total += weight
        while len(self._held) > self._entries or self._total > self._weight:
            self._total -= self._held.popitem(last=False)[1][1]


_decoded: Final[Lru[tuple[str, str | None, bool, int], NamedSpecs]] = Lru(entries=64, weight=256 << 20)


def decode_entry(entry: str, *, load_format: str | None, exact: bool, rank: int) -> NamedSpecs:
    """Names and contents of one rank's entry, in order.

    Raises:
        Undecodable: the real scheduler would die of it.
    """
    key = (entry, load_format, exact, rank)
    found = _decoded.get(key)
    if found is None:
        found = _decode(entry, load_format, exact, rank)
        _decoded.put(key, found, len(entry))
    return found


def is_base64(entry: str) -> bool:
    """Whether an entry passes the check that newer releases make before the scheduler sees it."""
    try:
        base64.b64decode(entry, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _decode(entry: str, load_format: str | None, exact: bool, rank: int) -> NamedSpecs:
    loaded = load_payload(_pickle_bytes(entry), exact=exact)
    if load_format == "flattened_bucket":
        return _bucket(loaded)
    return tuple(_named(item, exact, rank) for item in _items(loaded))


def _pickle_bytes(entry: str) -> bytes:
    try:
        data = base64.b64decode(entry, validate=True)
        if data[:1] == b"\x80" and data[1:2] <= bytes([MAX_PICKLE_PROTOCOL]):
            return data
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        pass
    try:
        return base64.b64decode(entry, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Undecodable(f"binascii.Error: {error}") from error


def _items(loaded: object) -> list[object]:
    if not isinstance(loaded, (list, tuple)):
        raise Undecodable(f"TypeError: '{type(loaded).__name__}' object is not a list of named tensors")
    return list(loaded)


def _named(item: object, exact: bool, rank: int) -> tuple[str, TensorSpec]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise Undecodable("ValueError: not enough values to unpack (expected 2)")
    name, tensor = item
    if isinstance(tensor, PerRank):
        if rank >= len(tensor.values):
            raise Undecodable("IndexError: list index out of range")
        tensor = load_payload(tensor.values[rank], exact=exact)
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise Undecodable(f"AttributeError: '{type(tensor).__name__}' object has no attribute 'to'")
    return name, spec_of(tensor.dtype, tensor.shape, tensor.data)


def _bucket(loaded: object) -> NamedSpecs:
    if not isinstance(loaded, dict):
        raise Undecodable(f"TypeError: '{type(loaded).__name__}' object is not subscriptable")
    missing = next((key for key in ("flattened_tensor", "metadata") if key not in loaded), None)
    if missing:
        raise Undecodable(f"KeyError: '{missing}'")
    flat, entries = loaded["flattened_tensor"], loaded["metadata"]
    if not isinstance(flat, Tensor) or len(flat.shape) != 1:
        raise Undecodable("TypeError: a bucket is one flat tensor")
    return tuple(_slice(flat, meta) for meta in _items(entries))


def _slice(flat: Tensor, meta: object) -> tuple[str, TensorSpec]:
    """One tensor of a bucket: sliced by elements of the flat one, viewed as its dtype, reshaped."""
    if not isinstance(meta, Metadata):
        raise Undecodable(f"AttributeError: '{type(meta).__name__}' object has no attribute 'name'")
    state = meta.state
    name, dtype, shape = state.get("name"), state.get("dtype"), state.get("shape")
    start, end = state.get("start_idx"), state.get("end_idx")
    if not (isinstance(name, str) and isinstance(dtype, Dtype) and isinstance(shape, (tuple, list))):
        raise Undecodable("AttributeError: a bucket's metadata is not complete")
    if type(start) is not int or type(end) is not int or not all(type(size) is int for size in shape):
        raise Undecodable("TypeError: slice indices must be integers")
    item = DTYPE_BYTES[flat.dtype]
    data = flat.data[start * item : end * item]
    wanted = DTYPE_BYTES[dtype.name]
    if len(data) % wanted or (wanted > item and (start * item) % wanted):
        raise Undecodable(f"RuntimeError: a bucket slice is not aligned for {dtype.name}")
    if prod(shape) * wanted != len(data):
        raise Undecodable(
            f"RuntimeError: shape '{list(shape)}' is invalid for input of size {len(data) // wanted}"
        )
    return name, spec_of(dtype.name, tuple(shape), data)
