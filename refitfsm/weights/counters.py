"""Counts of what is lent of CUDA memory, in shared memory, which borrowers count down when they let go.

torch's borrowers count down in whatever file of the known layout a handle names. So the file is ours, with a
count for many tensors at a time, where torch would make a count and an event for each.
"""

import atexit
import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import threading
from pathlib import Path

from refitfsm.weights.errors import WeightsError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps named shared memory
COUNTS = 10_000
"""How many counts torch maps of a file: `CUDA_IPC_REF_COUNTER_FILE_SIZE` of its CudaIPCTypes.h."""
HEADER_BYTES = 64  # torch's own count of the file's users, padded
_PREFIX = "refitfsm-counts-"
_COUNT = struct.Struct("=q")
USERS = struct.Struct("=i")
"""At the head of a file of shared memory: how many have it open, as torch counts them."""


class CountFile:
    """A file of counts for borrowers of CUDA memory. From any thread."""

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        _remove_abandoned(folder)
        self._path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.name = f"/{self._path.name}".encode()
        """What a borrower opens it by."""
        # Read and written by this user alone, as torch's own.
        self._file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b")
        fcntl.flock(self._file, fcntl.LOCK_EX)  # ends with this process, however that ends
        # One user of the file is this process: borrowers remove it when the last one leaves.
        self._file.write(USERS.pack(1).ljust(HEADER_BYTES, b"\0") + bytes(COUNTS * _COUNT.size))
        self._file.flush()
        self._view = mmap.mmap(self._file.fileno(), 0)
        self._lock = threading.Lock()
        self._free = list(range(COUNTS))
        self._out: dict[int, tuple[CudaCount, object]] = {}
        self._owner = os.getpid()
        atexit.register(self.close)

    def lend(self, borrowed: int, held: object) -> "CudaCount | None":
        """A count of tensors that one process borrows; None if the file is full.

        Args:
            borrowed: how often the borrower will count down.
            held: what must live until then.
        """
        with self._lock:
            if not self._free:
                return None
            index = self._free.pop()
            count = CudaCount(self, index)
            self._out[index] = (count, held)
            _COUNT.pack_into(self._view, HEADER_BYTES + index * _COUNT.size, borrowed)
        return count

    def is_back(self, count: "CudaCount") -> bool:
        """Whether a count has come down. Its place is used again."""
        with self._lock:
            if not self._is_out(count):
                return True
            if _COUNT.unpack_from(self._view, HEADER_BYTES + count.index * _COUNT.size)[0] > 0:
                return False
            del self._out[count.index]
            self._free.append(count.index)
            return True

    def write_off(self, count: "CudaCount") -> None:
        """Stop waiting for a count. Its place is not used again: somebody might still count down there."""
        with self._lock:
            if self._is_out(count):
                del self._out[count.index]

    def collect(self) -> None:
        """Let go of what is back."""
        with self._lock:
            out = [count for count, _ in self._out.values()]
        for count in out:
            self.is_back(count)

    def _is_out(self, count: "CudaCount") -> bool:
        return self._out.get(count.index, (None,))[0] is count

    def close(self) -> None:
        """Remove the file: nobody can borrow or give back any more. Idempotent."""
        if os.getpid() == self._owner:  # and not a forked child of it
            self._path.unlink(missing_ok=True)
            self._file.close()
            atexit.unregister(self.close)


def _remove_abandoned(folder: Path) -> None:
    """Remove files of processes that were killed: nobody locks them any more."""
    for path in folder.glob(f"{_PREFIX}*"):
        # One that is being made has no bytes yet. Those of other users are theirs.
        with contextlib.suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_size:
                path.unlink()


class CudaCount:
    """How often a borrower still has to count down. It holds what was lent for as long."""

    __slots__ = ("file", "index")

    def __init__(self, file: CountFile, index: int) -> None:
        self.file = file
        self.index = index

    def is_back(self) -> bool:
        """See `Counter.is_back`."""
        return self.file.is_back(self)

    def write_off(self) -> None:
        """See `Counter.write_off`."""
        self.file.write_off(self)


class CudaCounts:
    """The counts of this process, in as many files as it needs."""

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: list[CountFile] = []

    def lend(self, borrowed: int, held: object) -> CudaCount:
        """See `CountFile.lend`.

        Raises:
            WeightsError: there is no shared memory.
        """
        with self._lock:
            for file in self._files:
                count = file.lend(borrowed, held)
                if count is not None:
                    return count
            try:
                self._files.append(CountFile(self._folder))
            except OSError as error:
                raise WeightsError(
                    f"{self._folder}: what is lent cannot be counted there ({error.strerror}): give the"
                    " container shared memory, such as --shm-size 1g"
                ) from error
        return self.lend(borrowed, held)

    def collect(self) -> None:
        """Let go of what is back."""
        with self._lock:
            files = list(self._files)
        for file in files:
            file.collect()

    def close(self) -> None:
        """Remove the files. Idempotent."""
        with self._lock:
            files, self._files = self._files, []
        for file in files:
            file.close()


CUDA_COUNTS = CudaCounts()
