"""CUDA memory of this process, lent by handles: servers map the memory and copy from there.

What is unpickled for each tensor is the call of torch that maps another process's GPU memory. The receiving
SGLang has that call patched: where torch has the device's number, which means something else in each
process, it takes the device's UUID. Writing the UUID here makes the sender independent of both SGLang and
`CUDA_VISIBLE_DEVICES`. Tensors of one allocation share a storage there, which is opened once.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from refitfsm.weights.allocations import Allocation, CudaDriver, Driver
from refitfsm.weights.counters import CUDA_COUNTS, CudaCount, CudaCounts
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.lending import Lent
from refitfsm.weights.opcodes import Call, Global, Value

if TYPE_CHECKING:
    import torch

REBUILD = Global("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
_TENSOR, _STORAGE = Global("torch", "Tensor"), Global("torch.storage", "TypedStorage")


class Shared(NamedTuple):
    """An allocation that is lent once."""

    allocation: Allocation
    handle: bytes
    """CUDA's own. torch writes a head of its version before it, and refuses a newer one than its own; without
    any it takes the handle for an old torch's. So a server of any torch reads this."""
    counts: bytes
    """The name of the file that its borrower counts down in."""
    at: int
    """Where in that file."""


def rebuild_arguments(tensor: "torch.Tensor", shared: Shared, uuid: str) -> tuple[Value, ...]:
    """The arguments of `rebuild_cuda_tensor`, the same fifteen in torch 2.11, 2.13 and 2.14.

    The event that torch would have the borrower wait for is left out: the sender has waited already, and
    opening one costs the server as much time as opening the memory.
    """
    base, nbytes = shared.allocation
    offset = (tensor.data_ptr() - base) // tensor.element_size()
    dtype = Global("torch", str(tensor.dtype).removeprefix("torch."))
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    # A plain tensor that needs no gradient, whatever the trainer holds.
    return (
        *(_TENSOR, shape, strides, offset, _STORAGE, dtype, uuid),
        *(shared.handle, nbytes, 0, False, shared.counts, shared.at, b"", False),
    )


def lend(tensors: "Mapping[str, torch.Tensor]", driver: Driver, counts: CudaCounts, uuid: str) -> Lent:
    """See `Memory.lend`. `uuid` is the GPU's, as SGLang's torch spells it."""
    together: dict[Allocation, list[torch.Tensor]] = {}
    places: dict[str, Allocation] = {}
    handles: dict[Allocation, bytes] = {}
    for name, tensor in tensors.items():
        try:
            place = places[name] = driver.allocation_at(tensor.data_ptr())
            if place not in handles:
                handles[place] = driver.handle_of(place)
        except WeightsError as error:
            raise _cannot_share(name, error) from error
        together.setdefault(place, []).append(tensor)
    shared: dict[Allocation, Shared] = {}
    counters: list[CudaCount] = []
    for place, held in together.items():
        try:
            count = counts.lend(len(held), held)
        except WeightsError:
            for other in counters:
                other.write_off()
            raise
        counters.append(count)
        shared[place] = Shared(place, handles[place], count.file.name, count.index)
    values: dict[str, Value] = {
        name: Call(REBUILD, rebuild_arguments(tensor, shared[places[name]], uuid))
        for name, tensor in tensors.items()
    }
    return Lent(values, tuple(counters))


class CudaMemory:
    """One GPU of this process, by the installed torch."""

    def __init__(self, device: int) -> None:
        import torch  # noqa: PLC0415 - the package must import without torch

        self._torch = torch
        self._device = device
        self._driver: Driver = CudaDriver()
        self.place = str(torch.cuda.get_device_properties(device).uuid)

    def lend(self, tensors: "Mapping[str, torch.Tensor]", *, keep: bool = False) -> Lent:  # noqa: ARG002
        """See `Memory.lend`. The values are those of the last `synchronize`."""
        with self._torch.cuda.device(self._device):  # makes CUDA's context current in this thread
            return lend(tensors, self._driver, CUDA_COUNTS, self.place)

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
        CUDA_COUNTS.collect()


def _cannot_share(name: str, error: Exception) -> WeightsError:
    reason = str(error).partition("\n")[0]
    return WeightsError(
        f"tensor {name!r}: its GPU memory cannot be shared ({reason}): allocate it without expandable"
        " segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False) and outside a memory saver's region,"
        " or give tensor.clone() of such memory"
    )
