"""Entries of SGLang's `serialized_named_tensors` that carry the bytes themselves, made without torch.

An entry is base64 of a pickle of `[(name, tensor), ...]`. A tensor is pickled as torch pickles one on
the CPU: a call that rebuilds it from a storage, and the storage as the bytes that `torch.save` wrote in
its oldest format. Both generations of SGLang's unpickler (prefixes of module names up to 0.5.20, exact
names since) take these globals, and the nested bytes pass torch's own loader of weights only.

Formats that torch has no storage class for (float8, unsigned words) travel as a storage of bytes, and
the call names the format. Torch's own pickling of such tensors cannot be read back.
"""

import binascii
import struct
from collections.abc import Iterable

from refitfsm.weights.dtypes import DTYPES
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.opcodes import Blob, Buffer, Call, Global, PersistentId, Value, pickle_pieces

_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_WITH_DTYPE = Global("torch._utils", "_rebuild_tensor_v3")
_LOAD_STORAGE = Global("torch.storage", "_load_from_bytes")
_NO_HOOKS = Call(Global("collections", "OrderedDict"), ())

# The oldest torch.save format opens with three pickles: a magic number, a version, and facts about the
# writing machine.
_MAGIC = 0x1950A86A20F9469CFC6C
_FORMAT_VERSION = 1001
_WRITER: Value = {
    "protocol_version": _FORMAT_VERSION,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
_OPENING = b"".join(
    piece for value in (_MAGIC, _FORMAT_VERSION, _WRITER) for piece in pickle_pieces(value, protocol=2)
)
_KEY = "0"
_KEYS = b"".join(pickle_pieces([_KEY], protocol=2))


def check_sendable(spec: TensorSpec) -> None:
    """Say whether `cpu_payload` can carry a tensor.

    Raises:
        WeightsError: it has no elements, or torch has no format for its elements.
    """
    if spec.nbytes == 0:
        raise WeightsError(
            f"tensor {spec.name!r} of shape {list(spec.shape)} has no elements: leave it out of the push"
        )
    if spec.dtype not in DTYPES or DTYPES[spec.dtype].torch_name is None:
        raise WeightsError(
            f"tensor {spec.name!r} is {spec.dtype}, which has no equal in torch: send it packed into U8"
        )


def cpu_payload(tensors: Iterable[tuple[TensorSpec, Buffer]]) -> bytes:
    """One entry of `serialized_named_tensors` holding these tensors: base64, as ASCII bytes.

    Each buffer holds the elements of its tensor in row-major order, little-endian. The data is copied
    once before it is encoded.

    Raises:
        WeightsError: a buffer is not of its spec's size, or a tensor cannot be sent (`check_sendable`).
    """
    return binascii.b2a_base64(cpu_pickle(tensors), newline=False)


def cpu_pickle(tensors: Iterable[tuple[TensorSpec, Buffer]]) -> bytes:
    """The pickle inside `cpu_payload`; same arguments, same errors."""
    named: list[Value] = [(spec.name, tensor_value(spec, data)) for spec, data in tensors]
    return b"".join(pickle_pieces(named))


def tensor_value(spec: TensorSpec, data: Buffer) -> Call:
    """What has to be unpickled to get a CPU tensor of these bytes.

    Raises:
        WeightsError: the buffer is not of its spec's size, or the tensor cannot be sent.
    """
    check_sendable(spec)
    size = memoryview(data).nbytes
    if size != spec.nbytes:
        kind = f"{spec.dtype} {list(spec.shape)}"
        raise WeightsError(f"tensor {spec.name!r}: {size} bytes were given, and {kind} takes {spec.nbytes}")
    dtype = DTYPES[spec.dtype]
    numel = spec.nbytes // (dtype.bits // 8)
    placement: tuple[Value, ...] = (0, spec.shape, _strides(spec.shape), False, _NO_HOOKS)
    if dtype.storage is not None:
        return Call(_REBUILD, (_storage(dtype.storage, numel, data), *placement))
    storage = _storage("ByteStorage", spec.nbytes, data)
    return Call(_REBUILD_WITH_DTYPE, (storage, *placement, Global("torch", dtype.torch_name or "")))


def _storage(cls: str, numel: int, data: Buffer) -> Call:
    reference = PersistentId(("storage", Global("torch", cls), _KEY, "cpu", numel, None))
    head = b"".join((_OPENING, *pickle_pieces(reference, protocol=2), _KEYS, struct.pack("<q", numel)))
    return Call(_LOAD_STORAGE, (Blob((head, data)),))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
