"""The counts that torch keeps in shared memory of who holds a lent tensor."""

import mmap
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps named shared memory
_HEADER_BYTES = 64  # torch's own count of the file's users, padded
_COUNT = struct.Struct("=q")
_USERS = struct.Struct("=i")


class CountFile:
    """One file of counts, mapped. Each handle that torch gives names a file and a place in it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._view = mmap.mmap(file.fileno(), 0)

    def read(self, index: int) -> int:
        """The count at an index."""
        return int(_COUNT.unpack_from(self._view, _HEADER_BYTES + index * _COUNT.size)[0])

    def write(self, index: int, count: int) -> None:
        """Set the count at an index."""
        _COUNT.pack_into(self._view, _HEADER_BYTES + index * _COUNT.size, count)


_files: dict[bytes, CountFile] = {}
_lock = threading.Lock()


class CudaCount:
    """How many processes still hold a CUDA tensor that was lent: one, until the borrower lets go."""

    __slots__ = ("_file", "_index")

    def __init__(self, file: CountFile, index: int) -> None:
        self._file = file
        self._index = index

    @classmethod
    def of(cls, handle: bytes, index: int, folder: Path = SHARED_MEMORY) -> "CudaCount | None":
        """The count that a lent tensor's handle names, or None where it cannot be read here.

        One that does not say that somebody holds the tensor, right after it was lent, is not believed.
        """
        with _lock:
            file = _files.get(handle)
            if file is None:
                try:
                    file = CountFile(folder / handle.decode().lstrip("/"))
                except (OSError, ValueError):
                    return None
                _files[handle] = file
        try:
            return cls(file, index) if file.read(index) == 1 else None
        except struct.error:
            return None

    def is_back(self) -> bool:
        """See `Counter.is_back`."""
        return self._file.read(self._index) <= 0

    def write_off(self) -> None:
        """See `Counter.write_off`. torch frees the memory when it next collects."""
        self._file.write(self._index, 0)


class HostCount:
    """Whether a borrower still maps a file of shared host memory.

    The file counts this process, and one more from the moment it is lent until the borrower unmaps it. It
    does not say which borrower that is: a loan for one push is back when nobody maps the file but those
    that keep it, and one to keep when one that keeps it less does.
    """

    __slots__ = ("_back", "_give_up", "_keep", "_path")
    _kept: ClassVar[Counter[Path]] = Counter()
    """By how many each file is kept."""

    def __init__(self, name: str, give_up: Callable[[], None], *, keep: bool = False) -> None:
        self._path = SHARED_MEMORY / name.lstrip("/")
        self._give_up = give_up
        self._keep = keep
        self._back = False
        if keep:
            with _lock:
                self._kept[self._path] += 1

    def is_back(self) -> bool:
        """See `Counter.is_back`."""
        with _lock:
            others = self._kept[self._path] - self._keep
            if not self._back and self._users() <= 1 + others:
                self._strike()
        return self._back

    def write_off(self) -> None:
        """See `Counter.write_off`."""
        with _lock:
            if not self._back:
                self._give_up()
                self._strike()

    def _users(self) -> int:
        try:
            with self._path.open("rb") as file:
                return int(_USERS.unpack(file.read(_USERS.size))[0])
        except (OSError, struct.error):
            return 0

    def _strike(self) -> None:
        self._back = True
        if self._keep:
            self._kept[self._path] -= 1
