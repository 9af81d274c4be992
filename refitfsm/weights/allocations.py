"""Which allocation of a GPU an address lies in, and the handle that another process maps it by.

A handle maps a whole allocation, and torch puts many tensors into one. torch itself makes a handle, an event
and a count for each tensor; CUDA's driver is asked here for what is needed alone.
"""

import ctypes
from typing import NamedTuple, Protocol

from refitfsm.weights.errors import WeightsError

HANDLE_BYTES = 64


class Allocation(NamedTuple):
    """Memory that one call of cudaMalloc gave."""

    base: int
    nbytes: int


class Driver(Protocol):
    """What is asked of CUDA's driver."""

    def allocation_at(self, address: int) -> Allocation:
        """The allocation that an address lies in.

        Raises:
            WeightsError: it is no address of GPU memory.
        """
        ...

    def handle_of(self, allocation: Allocation) -> bytes:
        """What another process opens an allocation by, `HANDLE_BYTES` bytes.

        Raises:
            WeightsError: its memory cannot be shared.
        """
        ...


class CudaDriver:
    """libcuda, for threads whose CUDA context is current.

    Raises:
        WeightsError: there is none.
    """

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise WeightsError(f"CUDA's driver cannot be loaded ({error}): give CPU tensors") from None

    def allocation_at(self, address: int) -> Allocation:
        """See `Driver.allocation_at`."""
        base, nbytes = ctypes.c_ulonglong(), ctypes.c_size_t()
        status = self._cuda.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_ulonglong(address)
        )
        if status != 0:
            raise WeightsError(f"CUDA's error {status} of cuMemGetAddressRange")
        return Allocation(base.value, nbytes.value)

    def handle_of(self, allocation: Allocation) -> bytes:
        """See `Driver.handle_of`."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        status = self._cuda.cuIpcGetMemHandle(handle, ctypes.c_ulonglong(allocation.base))
        if status != 0:
            raise WeightsError(f"CUDA's error {status} of cuIpcGetMemHandle")
        return handle.raw
