"""Host memory shared with servers of this machine and user, by the name of a file in shared memory."""

import math
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from refitfsm.weights.counters import SHARED_MEMORY, USERS
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.lending import Counter as Count
from refitfsm.weights.lending import Lent
from refitfsm.weights.opcodes import Value
from refitfsm.weights.shared import named_value

if TYPE_CHECKING:
    import torch


class HostMemory:
    """The memory of this machine. A tensor that is lent is moved to shared memory first."""

    place = ""

    def settle_in(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Move tensors to shared memory now, so that their addresses stay what they are from here on.

        Raises:
            WeightsError: this memory cannot be shared with another process.
        """
        for name, tensor in tensors.items():
            named_value(name, tensor)

    def lend(self, tensors: "Mapping[str, torch.Tensor]", *, keep: bool = False) -> Lent:
        """See `Memory.lend`."""
        values: dict[str, Value] = {}
        counters: list[Count] = []
        for name, tensor in tensors.items():
            try:
                values[name] = named_value(name, tensor)
            except WeightsError:
                for counter in counters:
                    counter.write_off()
                raise
            storage = tensor.untyped_storage()
            _, handle, _ = storage._share_filename_cpu_()
            storage._shared_incref()  # noqa: SLF001 - the borrower counts down what it was sent
            counters.append(HostCount(handle.decode(), storage._shared_decref, keep=keep))  # noqa: SLF001
        return Lent(values, tuple(counters))

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


class HostCount:
    """Whether a borrower still maps a file of shared host memory.

    The file counts this process, and one more from the moment it is lent until the borrower unmaps it. It
    does not say which borrower that is: a loan for one push is back when nobody maps the file but those
    that keep it, and one to keep when one that keeps it less does.
    """

    __slots__ = ("_back", "_give_up", "_keep", "_path")
    _lock = threading.Lock()
    _kept: ClassVar[Counter[Path]] = Counter()
    """By how many each file is kept."""

    def __init__(self, name: str, give_up: Callable[[], None], *, keep: bool = False) -> None:
        self._path = SHARED_MEMORY / name.lstrip("/")
        self._give_up = give_up
        self._keep = keep
        self._back = False
        if keep:
            with self._lock:
                self._kept[self._path] += 1

    def is_back(self) -> bool:
        """See `Counter.is_back`."""
        with self._lock:
            others = self._kept[self._path] - self._keep
            if not self._back and self._users() <= 1 + others:
                self._strike()
        return self._back

    def write_off(self) -> None:
        """See `Counter.write_off`."""
        with self._lock:
            if not self._back:
                self._give_up()
                self._strike()

    def _users(self) -> float:
        """By how many the file is mapped: none if it is gone, any number if it cannot be read."""
        try:
            with self._path.open("rb") as file:
                return int(USERS.unpack(file.read(USERS.size))[0])
        except FileNotFoundError:
            return 0
        except (OSError, struct.error):
            return math.inf

    def _strike(self) -> None:
        self._back = True
        if self._keep:
            self._kept[self._path] -= 1
