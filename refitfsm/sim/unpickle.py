"""Reads the pickles that carry weights, without torch and without running anything they name.

Only globals on SGLang's own allow-list are looked at, and of those only the ones that carry tensors
are known here, each mapped to a small local stand-in. Everything else ends the load, as it ends the
real scheduler.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from refitfsm.sim.allowlist import refusal
from refitfsm.sim.content import DTYPE_BYTES
from refitfsm.sim.tensors import Dtype, Storage, Tensor, Undecodable, strided

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001

_STORAGES: Final = {
    "BFloat16Storage": "BF16",
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ComplexFloatStorage": "C64",
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "ShortStorage": "I16",
    "UntypedStorage": None,
}
_DTYPES: Final = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}


class Blocked(Undecodable):
    """A pickle named a global that SGLang does not let through."""


class Metadata:
    """One tensor's place in a flattened bucket; the attributes come from the pickle."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {}

    def __setstate__(self, state: object) -> None:
        self.state = _string_keys(state)


class PerRank:
    """A tensor given as one pickle for each rank."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def __setstate__(self, state: object) -> None:
        values = _string_keys(state).get("values")
        if not isinstance(values, list) or not all(isinstance(value, bytes) for value in values):
            raise Undecodable("AttributeError: 'LocalSerializedTensor' object has no attribute 'values'")
        self.values = values


class _StorageType(NamedTuple):
    dtype: str | None


class _Opaque:
    """Something that is allowed in a payload and of no use here."""

    def __new__(cls, *_args: object) -> "_Opaque":
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Keeps nothing."""


def _string_keys(state: object) -> dict[str, object]:
    if not isinstance(state, dict):
        raise Undecodable("TypeError: an object's state is a dict")
    return {str(key): value for key, value in state.items()}


def _rebuild_v2(storage: object, offset: object, size: object, stride: object, *_rest: object) -> Tensor:
    return strided(storage, offset, size, stride)


def _rebuild_v3(storage: object, offset: object, size: object, stride: object, *rest: object) -> Tensor:
    """The dtype comes with the call, after two arguments that do not matter; the storage is just bytes."""
    dtype = rest[2] if len(rest) > 2 else None
    return strided(_rebuild_typed(storage, dtype), offset, size, stride)


def _rebuild_shared(_cls: object, storage: object, metadata: object) -> Tensor:
    if not isinstance(metadata, tuple) or len(metadata) < 3:
        raise Undecodable("ValueError: not enough values to unpack")
    return strided(storage, *metadata[:3])


def _rebuild_typed(storage: object, dtype: object) -> Storage:
    if not isinstance(storage, Storage) or not isinstance(dtype, Dtype):
        raise Undecodable("TypeError: a typed storage is made of a storage and a dtype")
    return Storage(dtype.name, storage.data)


def _rebuild_parameter(data: object, *_rest: object) -> object:
    return data


def _size(values: object = ()) -> object:
    return values


def _fails(message: str) -> Callable[..., object]:
    def fail(*_args: object, **_options: object) -> object:
        raise Undecodable(message)

    return fail


_NO_IPC: Final = "RuntimeError: the simulator has no GPU: a CUDA IPC handle cannot be opened here"
_NO_SHM: Final = "RuntimeError: the simulator does not open torch's shared memory"
_NO_DTYPE: Final = "AttributeError: type object 'torch.storage.UntypedStorage' has no attribute 'dtype'"
_NO_AUTH: Final = "AuthenticationError: digest sent was rejected"


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """How pickle protocols below 3 spell bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise Undecodable("TypeError: _codecs.encode is for bytes spelled in latin1")
    return text.encode("latin1")


_KNOWN: Final[dict[tuple[str, str], object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "tuple"): tuple,
    ("_codecs", "encode"): _encode,
    ("torch", "Tensor"): _Opaque,
    ("torch", "Size"): _size,
    ("torch", "device"): _Opaque,
    ("torch.nn.parameter", "Parameter"): _Opaque,
    ("torch._utils", "_rebuild_tensor"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): _StorageType(None),
    ("torch.storage", "TypedStorage"): _Opaque,
    ("multiprocessing.resource_sharer", "DupFd"): _Opaque,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): _rebuild_shared,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): _rebuild_typed,
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"): _fails(_NO_AUTH),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): _fails(_NO_SHM),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _fails(_NO_IPC),
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _fails(_NO_IPC),
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): Metadata,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorBucket"): _Opaque,
    ("sglang.srt.model_executor.model_runner", "LocalSerializedTensor"): PerRank,
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "LocalSerializedTensor"): PerRank,
}


class _PayloadUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, *, exact: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._exact = exact

    def find_class(self, module: str, name: str) -> object:
        refused = refusal(module, name, exact=self._exact)
        if refused is not None:
            raise Blocked(refused)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return load_storage
        if module == "torch" and name in _DTYPES:
            return Dtype(_DTYPES[name])
        if module == "torch" and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        found = _KNOWN.get((module, name))
        if found is None:
            raise Undecodable(f"the simulator does not know the allowed global {module}.{name}")
        return found


class _StorageUnpickler(pickle.Unpickler):
    """The pickles inside a storage: only storage types, and storages by persistent id."""

    def find_class(self, module: str, name: str) -> object:
        if module in {"torch", "torch.storage"} and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        raise Blocked(f"UnpicklingError: Weights only load failed: unsupported global {module}.{name}")

    def persistent_load(self, pid: object) -> object:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise Undecodable("RuntimeError: unknown persistent id in a storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        if not isinstance(kind, _StorageType) or not isinstance(key, str) or type(numel) is not int:
            raise Undecodable("RuntimeError: unknown persistent id in a storage")
        return (kind.dtype, key, numel)


def load_payload(data: bytes, *, exact: bool) -> object:
    """What a payload's pickle holds: containers, strings, numbers, and the stand-ins of `tensors`.

    `exact` chooses the allow-list of SGLang 0.5.21 and later.

    Raises:
        Blocked: it names a global that SGLang does not let through.
        Undecodable: it is no pickle, or holds what cannot be rebuilt.
    """
    return _guarded(lambda: _PayloadUnpickler(data, exact=exact).load())


def load_storage(data: object) -> Storage:
    """A storage from the bytes of `torch.save` in its legacy format, as pickled tensors carry them.

    Raises:
        Undecodable: it is something else.
    """
    if not isinstance(data, bytes):
        raise Undecodable("TypeError: a storage is loaded from bytes")
    stream = io.BytesIO(data)
    head = [_guarded(lambda: _StorageUnpickler(stream).load()) for _ in range(3)]
    if head[0] != _MAGIC or head[1] != _PROTOCOL:
        raise Undecodable("UnpicklingError: not a storage in torch's legacy format")
    found = _guarded(lambda: _StorageUnpickler(stream).load())
    keys = _guarded(lambda: _StorageUnpickler(stream).load())
    if not isinstance(found, tuple) or keys != [found[1]]:
        raise Undecodable("UnpicklingError: Expected a Torch storage")
    dtype, _, numel = found
    if dtype is None:  # dtypes that have no storage type of their own; torch itself cannot read them back
        raise Undecodable(_NO_DTYPE)
    stored = int.from_bytes(stream.read(8), "little")
    nbytes = stored * DTYPE_BYTES[dtype]
    raw = stream.read()
    if stored != numel or len(raw) != nbytes:
        raise Undecodable("RuntimeError: a storage has another size than it says")
    return Storage(dtype, raw)


def _guarded(load: Callable[[], object]) -> object:
    """Run a load; whatever a malformed pickle raises is `Undecodable`."""
    try:
        return load()
    except Undecodable:
        raise
    except Exception as error:  # the input is anything at all, and so is what it raises
        raise Undecodable(f"{type(error).__name__}: {error}") from error
