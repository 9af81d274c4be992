"""Host memory shared with servers of this machine and user, by the name of a file in shared memory."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from refitfsm.weights.counters import HostCount
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.lending import Lent
from refitfsm.weights.shared import shared_value

if TYPE_CHECKING:
    import torch


class HostMemory:
    """The memory of this machine. A tensor that is lent is moved to shared memory first."""

    place = ""

    def settle_in(self, tensors: "Iterable[torch.Tensor]") -> None:
        """Move tensors to shared memory now, so that their addresses stay what they are from here on."""
        for tensor in tensors:
            shared_value(tensor)

    def lend(self, name: str, tensor: "torch.Tensor", *, keep: bool = False) -> Lent:
        """See `Memory.lend`."""
        try:
            value = shared_value(tensor)
        except WeightsError as error:
            raise WeightsError(f"tensor {name!r}: {error}") from None
        storage = tensor.untyped_storage()
        _, handle, _ = storage._share_filename_cpu_()
        storage._shared_incref()  # noqa: SLF001 - the borrower counts down what it was sent
        return Lent(value, HostCount(handle.decode(), storage._shared_decref, keep=keep))  # noqa: SLF001

    def empty(self, nbytes: int) -> "torch.Tensor":
        """See `Memory.empty`."""
        import torch  # noqa: PLC0415 - the package must import without torch

        return torch.empty(nbytes, dtype=torch.uint8)

    def free_bytes(self) -> int | None:
        """See `Memory.free_bytes`: not known, since the machine swaps and overcommits."""
        return None

    def synchronize(self) -> None:
        """See `Memory.synchronize`: what the CPU has written is written."""

    def collect(self) -> None:
        """See `Memory.collect`: the file goes when nobody maps it."""
