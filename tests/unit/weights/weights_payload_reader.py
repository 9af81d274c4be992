"""Reads payloads without torch: what a real reader would rebuild, as plain values."""

import base64
import pickle
import pickletools
from collections import OrderedDict
from io import BytesIO
from typing import NamedTuple

# What SGLang's strict unpickler (0.5.21 and later) takes, of what payloads could name. "torch" stands
# for its dtypes, which that list has in full.
STRICT = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch.storage", "_load_from_bytes"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.storage", "TypedStorage"),
    ("torch", "Tensor"),
    ("collections", "OrderedDict"),
}


class Storage(NamedTuple):
    cls: str
    location: str
    numel: int
    data: bytes


class Rebuilt(NamedTuple):
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    dtype: str | None = None


class Handle(NamedTuple):
    arguments: tuple[object, ...]


def read(entry: bytes) -> list[tuple[str, object]]:
    """The named tensors of one entry."""
    return read_pickle(base64.b64decode(entry, validate=True))


def read_pickle(data: bytes) -> list[tuple[str, object]]:
    return _Reader(BytesIO(data)).load()


def globals_of(entry: bytes) -> set[tuple[str, str]]:
    """The globals that the outer pickle of an entry names."""
    data = base64.b64decode(entry, validate=True)
    return {
        tuple(argument.split(" "))
        for opcode, argument, _ in pickletools.genops(data)
        if opcode.name in {"GLOBAL", "INST"}
    }


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3":
                return _rebuild
            case "torch.storage", "_load_from_bytes":
                return _load_storage
            case "torch.multiprocessing.reductions", "rebuild_cuda_tensor":
                return lambda *arguments: Handle(arguments)
            case "collections", "OrderedDict":
                return OrderedDict
            case _:
                return f"{module}.{name}"


class _StorageReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        return f"{module}.{name}"

    def persistent_load(self, identifier: object) -> object:
        return identifier


def _load_storage(data: bytes) -> Storage:
    stream = BytesIO(data)
    magic, version, writer = (pickle.load(stream) for _ in range(3))
    assert (magic, version) == (0x1950A86A20F9469CFC6C, 1001)
    assert writer["little_endian"] is True
    kind, cls, key, location, numel, view = _StorageReader(stream).load()
    assert (kind, view) == ("storage", None)
    assert pickle.load(stream) == [key]
    assert int.from_bytes(stream.read(8), "little") == numel
    return Storage(cls, location, numel, stream.read())


def _rebuild(*arguments):
    storage, offset, shape, strides, requires_grad, hooks, *dtype = arguments
    assert hooks == {}
    return Rebuilt(storage, offset, tuple(shape), tuple(strides), requires_grad, *dtype)
