"""Small stand-ins for torch's storages and tensors: a dtype, a shape and bytes, nothing that computes."""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Final, Literal, NamedTuple

from refitfsm.sim.content import DTYPE_BYTES

MAX_GATHER: Final = 1 << 22
"""Elements of a non-contiguous tensor beyond which it is not put in order here."""
_MAX_DIMS: Final = 16
_CELLS: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Undecodable(Exception):
    """A payload that SGLang's scheduler would not survive. The message is what its log would say."""


class Dtype(NamedTuple):
    """A torch dtype, by its name in the safetensors format."""

    name: str


class Storage(NamedTuple):
    """A run of bytes of one dtype."""

    dtype: str
    data: bytes


class Tensor(NamedTuple):
    """A tensor with its elements in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def strided(storage: object, offset: object, shape: object, stride: object) -> Tensor:
    """The tensor that torch rebuilds from a storage; offset and strides count elements.

    Raises:
        Undecodable: an argument is of the wrong kind, or the tensor leaves its storage.
    """
    if not isinstance(storage, Storage):
        raise Undecodable("TypeError: a tensor needs a storage")
    name = storage.dtype
    sizes, strides = _whole(shape), _whole(stride)
    start = _whole((offset,))[0]
    if len(sizes) != len(strides) or len(sizes) > _MAX_DIMS:
        raise Undecodable("RuntimeError: mismatch in length of strides and shape")
    item = DTYPE_BYTES[name]
    count = prod(sizes)
    last = start + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    if count and (last + 1) * item > len(storage.data):
        raise Undecodable("RuntimeError: setStorage: sizes and strides are out of bounds for the storage")
    if count == 0 or strides == _row_major(sizes) or _is_row_major(sizes, strides):
        data = memoryview(storage.data)[start * item : (start + count) * item]
    else:
        data = _gather(storage.data, start, sizes, strides, item)
    return Tensor(name, sizes, data)


def _whole(values: object) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or any(type(v) is not int or v < 0 for v in values):
        raise Undecodable("TypeError: sizes, strides and offsets are whole numbers")
    return tuple(values)


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(sizes[at + 1 :]) for at in range(len(sizes)))


def _is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides are row-major where they matter: a dimension of size 1 has any."""
    wanted = zip(sizes, strides, _row_major(sizes), strict=True)
    return all(size == 1 or have == want for size, have, want in wanted)


def _gather(data: bytes, start: int, sizes: Sequence[int], strides: Sequence[int], item: int) -> memoryview:
    """Copy a strided tensor, row by row, into row-major order."""
    if prod(sizes) > MAX_GATHER:
        raise Undecodable(f"a non-contiguous tensor of shape {list(sizes)} is too large for the simulator")
    usable = len(data) - len(data) % item
    cells = memoryview(data)[:usable].cast(_CELLS[item])
    row, step = sizes[-1], strides[-1]
    rows = []
    for index in product(*(range(size) for size in sizes[:-1])):
        at = start + sum(i * stride for i, stride in zip(index, strides, strict=False))
        if step:
            rows.append(cells[at : at + (row - 1) * step + 1 : step].tobytes())
        else:
            rows.append(cells[at : at + 1].tobytes() * row)
    return memoryview(b"".join(rows))
