"""Entries of `serialized_named_tensors` that name host memory instead of carrying bytes.

A server on the same machine, run by the same user, maps the tensors by the name of their file in shared
memory, as torch's own sharing strategy `file_system` does. torch writes such a pickle only while that
strategy is chosen for the whole process, and not at all once SGLang has patched it; so it is written here.
"""

import binascii
from collections.abc import Iterable
from typing import TYPE_CHECKING

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.opcodes import Call, Global, Value, pickle_pieces

if TYPE_CHECKING:
    import torch

_REDUCTIONS = "torch.multiprocessing.reductions"
_REBUILD_TENSOR = Global(_REDUCTIONS, "rebuild_tensor")
_REBUILD_TYPED = Global(_REDUCTIONS, "rebuild_typed_storage")
_REBUILD_FILE = Global(_REDUCTIONS, "rebuild_storage_filename")
_TENSOR, _STORAGE = Global("torch", "Tensor"), Global("torch.storage", "UntypedStorage")


def shared_entry(pairs: "Iterable[tuple[str, torch.Tensor]]") -> bytes:
    """One entry, base64 as ASCII bytes, for one process to unpickle once, while the tensors live.

    The tensors are moved to shared memory (`shared_value`). Each is counted as in use by one process more:
    the reader counts that down when it maps the tensor. An entry that nobody reads, or two read, leaves the
    count wrong.

    Raises:
        WeightsError: a tensor cannot be shared.
    """
    named = [(name, tensor, named_value(name, tensor)) for name, tensor in pairs]
    for _, tensor, _ in named:
        tensor.untyped_storage()._shared_incref()  # noqa: SLF001 - torch's own pickling does the same
    entry: list[Value] = [(name, value) for name, _, value in named]
    return binascii.b2a_base64(b"".join(pickle_pieces(entry)), newline=False)


def shared_value(tensor: "torch.Tensor") -> Value:
    """What has to be unpickled to map a CPU tensor: a plain one, of the same strides, without gradient.

    A tensor whose storage is not in a named file yet is moved to one: its values stay, its address
    (`data_ptr`) changes, and all tensors of the same storage move with it. Its users are not counted.

    Raises:
        WeightsError: it is not a dense CPU tensor, or has no elements, or there is no room for it.
    """
    _check(tensor)
    try:
        manager, handle, nbytes = tensor.untyped_storage()._share_filename_cpu_()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise WeightsError(
            f"its memory cannot be shared ({reason}): give /dev/shm room for all tensors, such as a"
            " container's --shm-size 64g, or leave share_host_memory out, so that bytes travel"
        ) from error
    storage = Call(_REBUILD_FILE, (_STORAGE, bytes(manager), bytes(handle), int(nbytes)))
    dtype = Global("torch", str(tensor.dtype).removeprefix("torch."))
    metadata = (int(tensor.storage_offset()), _ints(tensor.shape), _ints(tensor.stride()), False)
    return Call(_REBUILD_TENSOR, (_TENSOR, Call(_REBUILD_TYPED, (storage, dtype)), metadata))


def named_value(name: str, tensor: "torch.Tensor") -> Value:
    """`shared_value`, whose error names the tensor."""
    try:
        return shared_value(tensor)
    except WeightsError as error:
        raise WeightsError(f"tensor {name!r}: {error}") from None


def _check(tensor: "torch.Tensor") -> None:
    if tensor.device.type != "cpu":
        raise WeightsError(f"it is on {tensor.device}, and host memory is to be shared: give a CPU tensor")
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
        raise WeightsError("it is sparse or quantised by torch: give its parts as plain tensors")
    if tensor.is_conj() or tensor.is_neg():
        raise WeightsError("it is a conjugate or negative view: give tensor.resolve_conj().resolve_neg()")
    if tensor.numel() == 0:
        raise WeightsError("it has no elements: leave it out of the push")


def _ints(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)
