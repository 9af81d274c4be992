"""Entries of `serialized_named_tensors` that hand over CUDA memory instead of bytes.

Such an entry pickles, for each tensor, the call of torch that maps another process's GPU memory. The
receiving SGLang has that call patched: where torch has the device's number, which means something else
in each process, it takes the device's UUID. Writing the UUID here makes the sender independent of both
SGLang and `CUDA_VISIBLE_DEVICES`.
"""

import binascii
from typing import TYPE_CHECKING, Protocol

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.opcodes import Call, Global, Value, pickle_pieces

if TYPE_CHECKING:
    import torch

REBUILD = Global("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
ARGUMENTS = 15
DEVICE_AT = 6
_GLOBALS_AT = {0: Global("torch", "Tensor"), 4: Global("torch.storage", "TypedStorage")}
_DTYPE_AT = 5


class CudaSharing(Protocol):
    """What is needed of torch to share GPU memory with another process on the same machine."""

    def uuid(self, device: int) -> str:
        """The UUID of a device of this process, spelled as SGLang's own torch spells it."""
        ...

    def reduce(self, tensor: "torch.Tensor") -> tuple[object, ...]:
        """The arguments of `rebuild_cuda_tensor` for one consumer of the tensor."""
        ...

    def collect(self) -> None:
        """Free what consumers no longer use."""
        ...


class TorchCudaSharing:
    """`CudaSharing` by the installed torch."""

    def uuid(self, device: int) -> str:
        """See `CudaSharing.uuid`."""
        import torch  # noqa: PLC0415 - the package must import without torch

        return str(torch.cuda.get_device_properties(device).uuid)

    def reduce(self, tensor: "torch.Tensor") -> tuple[object, ...]:
        """See `CudaSharing.reduce`."""
        from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415

        # Detached: a plain tensor that needs no gradient, whatever the trainer holds.
        _, arguments = reduce_tensor(tensor.detach())
        return tuple(arguments)

    def collect(self) -> None:
        """See `CudaSharing.collect`."""
        import torch  # noqa: PLC0415

        torch.cuda.ipc_collect()


def cuda_payload(handles: list[tuple[str, tuple[object, ...]]], uuid: str) -> bytes:
    """One entry for one consumer: base64, as ASCII bytes.

    `handles` are names with the arguments of `rebuild_cuda_tensor` that `CudaSharing.reduce` gave.

    Raises:
        WeightsError: this torch reduces a CUDA tensor to something unexpected.
    """
    named: list[Value] = [(name, Call(REBUILD, _arguments(name, given, uuid))) for name, given in handles]
    return binascii.b2a_base64(b"".join(pickle_pieces(named)), newline=False)


def _arguments(name: str, given: tuple[object, ...], uuid: str) -> tuple[Value, ...]:
    if len(given) != ARGUMENTS:
        raise WeightsError(
            f"tensor {name!r}: this torch shares CUDA tensors by {len(given)} values, {ARGUMENTS} were"
            " expected: use a torch from 2.4 to 2.13, or send CPU tensors"
        )
    return tuple(_argument(name, at, value, uuid) for at, value in enumerate(given))


def _argument(name: str, at: int, value: object, uuid: str) -> Value:
    if at in _GLOBALS_AT:
        return _GLOBALS_AT[at]
    if at == _DTYPE_AT:
        return Global("torch", str(value).removeprefix("torch."))
    if at == DEVICE_AT:
        return uuid
    match value:
        case None | bool() | int() | str() | bytes():
            return value
        case tuple():  # torch.Size among them
            return tuple(int(item) for item in value)
    raise WeightsError(
        f"tensor {name!r}: this torch gives a {type(value).__name__} as value {at} of a shared CUDA tensor:"
        " use a torch from 2.4 to 2.13, or send CPU tensors"
    )
