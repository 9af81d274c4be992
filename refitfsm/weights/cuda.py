"""Entries of `serialized_named_tensors` that hand over CUDA memory instead of bytes.

Such an entry pickles, for each tensor, the call of torch that maps another process's GPU memory. The
receiving SGLang has that call patched: where torch has the device's number, which means something else
in each process, it takes the device's UUID. Writing the UUID here makes the sender independent of both
SGLang and `CUDA_VISIBLE_DEVICES`.
"""

from typing import TYPE_CHECKING

from refitfsm.weights.counters import CudaCount
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.lending import Lent
from refitfsm.weights.opcodes import Call, Global, Value

if TYPE_CHECKING:
    import torch

REBUILD = Global("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
ARGUMENTS = 15
DEVICE_AT = 6
COUNTER_AT, COUNTER_INDEX_AT, EVENT_AT, WAITS_AT = 11, 12, 13, 14
_GLOBALS_AT = {0: Global("torch", "Tensor"), 4: Global("torch.storage", "TypedStorage")}
_DTYPE_AT = 5


class CudaMemory:
    """One GPU of this process, by the installed torch."""

    def __init__(self, device: int) -> None:
        import torch  # noqa: PLC0415 - the package must import without torch

        self._torch = torch
        self._device = device
        self.place = str(torch.cuda.get_device_properties(device).uuid)

    def lend(self, name: str, tensor: "torch.Tensor", *, keep: bool = False) -> Lent:  # noqa: ARG002
        """See `Memory.lend`. The values are those of the last `synchronize`."""
        from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415

        try:
            # Detached: a plain tensor that needs no gradient, whatever the trainer holds.
            given = tuple(reduce_tensor(tensor.detach())[1])
        except RuntimeError as error:
            raise WeightsError(_cannot_share(name, error)) from error
        value = Call(REBUILD, handle_arguments(name, given, self.place))
        handle, index = given[COUNTER_AT], given[COUNTER_INDEX_AT]
        if isinstance(handle, bytes) and isinstance(index, int):
            return Lent(value, CudaCount.of(handle, index))
        return Lent(value, None)

    def empty(self, nbytes: int) -> "torch.Tensor":
        """See `Memory.empty`."""
        torch = self._torch
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._device))
        except torch.OutOfMemoryError as error:
            raise WeightsError(f"GPU {self.place} has no room for a buffer of {nbytes:,} bytes") from error

    def free_bytes(self) -> int | None:
        """See `Memory.free_bytes`: what the GPU has free, and what torch keeps for itself."""
        cuda = self._torch.cuda
        free, _ = cuda.mem_get_info(self._device)
        return int(free + cuda.memory_reserved(self._device) - cuda.memory_allocated(self._device))

    def synchronize(self) -> None:
        """See `Memory.synchronize`: all streams of the GPU."""
        self._torch.cuda.synchronize(self._device)

    def collect(self) -> None:
        """See `Memory.collect`."""
        self._torch.cuda.ipc_collect()


def _cannot_share(name: str, error: RuntimeError) -> str:
    reason = str(error).partition("\n")[0]
    return (
        f"tensor {name!r}: torch cannot share its GPU memory ({reason}): allocate it without expandable"
        " segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False) and outside a memory saver's region,"
        " or give tensor.clone() of such memory"
    )


def handle_arguments(name: str, given: tuple[object, ...], uuid: str) -> tuple[Value, ...]:
    """The arguments of `rebuild_cuda_tensor` for one consumer, from those that torch gave.

    The event that torch would have the consumer wait for is left out: the sender has waited already, and
    opening one costs the server as much time as opening the memory.

    Raises:
        WeightsError: this torch reduces a CUDA tensor to something unexpected.
    """
    if len(given) != ARGUMENTS:
        raise WeightsError(
            f"tensor {name!r}: this torch shares CUDA tensors by {len(given)} values, {ARGUMENTS} were"
            " expected: use a torch from 2.4 to 2.13, or send CPU tensors"
        )
    fixed: dict[int, Value] = {**_GLOBALS_AT, DEVICE_AT: uuid, EVENT_AT: b"", WAITS_AT: False}
    fixed[_DTYPE_AT] = Global("torch", str(given[_DTYPE_AT]).removeprefix("torch."))
    return tuple(fixed[at] if at in fixed else _argument(name, at, value) for at, value in enumerate(given))


def _argument(name: str, at: int, value: object) -> Value:
    match value:
        case None | bool() | int() | str() | bytes():
            return value
        case tuple():  # torch.Size among them
            return tuple(int(item) for item in value)
    raise WeightsError(
        f"tensor {name!r}: this torch gives a {type(value).__name__} as value {at} of a shared CUDA tensor:"
        " use a torch from 2.4 to 2.13, or send CPU tensors"
    )
