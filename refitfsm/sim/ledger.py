"""The byte ledger of simulated GPUs: who holds how much of which, and never more than there is."""

from collections.abc import Mapping


class LedgerError(ValueError):
    """A request that no ledger can carry out: an unknown GPU, or bytes held twice."""


class GpuLedger:
    """Bytes by GPU and holder. A holder is any label, such as "server-3/weights" or "trainer".

    A GPU that is not given a capacity has no limit.
    """

    def __init__(self, capacity: Mapping[str, int] | None = None) -> None:
        self._capacity = dict(capacity or {})
        self._held: dict[str, dict[str, int]] = {gpu: {} for gpu in self._capacity}
        self._used: dict[str, int] = dict.fromkeys(self._capacity, 0)

    def take(self, gpu: str, holder: str, nbytes: int) -> bool:
        """Give `holder` this many bytes of `gpu`; False, and nothing changes, where they are not free.

        Raises:
            LedgerError: the holder already holds bytes of this GPU.
        """
        held = self._held.setdefault(gpu, {})
        if holder in held:
            raise LedgerError(f"{holder} already holds {held[holder]} bytes of {gpu}")
        used = self._used.get(gpu, 0)
        capacity = self._capacity.get(gpu)
        if capacity is not None and used + nbytes > capacity:
            return False
        held[holder] = nbytes
        self._used[gpu] = used + nbytes
        return True

    def give_back(self, gpu: str, holder: str) -> int:
        """Take back all that `holder` holds of `gpu`; the bytes freed, 0 where it held none."""
        freed = self._held.get(gpu, {}).pop(holder, 0)
        if freed:
            self._used[gpu] -= freed
        return freed

    def capacity(self, gpu: str) -> int | None:
        """Bytes of the GPU, or None for no limit."""
        return self._capacity.get(gpu)

    def used(self, gpu: str) -> int:
        """Bytes held by anyone."""
        return self._used.get(gpu, 0)

    def free(self, gpu: str) -> int | None:
        """Bytes free, or None for no limit."""
        capacity = self._capacity.get(gpu)
        return None if capacity is None else capacity - self._used[gpu]

    def holders(self, gpu: str) -> Mapping[str, int]:
        """Bytes by holder, in the order they were taken."""
        return dict(self._held.get(gpu, {}))
