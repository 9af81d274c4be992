"""Memory of this process that is lent to a server, and the proof that it came back.

torch counts, in memory shared by both processes, what of a loan is still held. A server that lets go of
one first waits for its own stream, and then counts down: a count of nobody proves that the copies are
done. The answer 200 does not: it may be written while they run.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.offer import Target
from refitfsm.weights.opcodes import Value

if TYPE_CHECKING:
    import torch

RETURN_S = 10.0
"""How long a server may hold on to memory after it has answered. It lets go before, as a rule."""
_POLL_FIRST_S, _POLL_MAX_S = 0.0002, 0.02


class Counter(Protocol):
    """How a loan is counted."""

    def is_back(self) -> bool:
        """Whether nobody holds it any more."""
        ...

    def write_off(self) -> None:
        """Count it as back: who was to give it back is gone. Idempotent."""
        ...


class Lent(NamedTuple):
    """Tensors that were lent once, together."""

    values: Mapping[str, Value]
    """What the server has to unpickle to get each, by name. It has to unpickle all."""
    counters: tuple[Counter, ...]


class Memory(Protocol):
    """One place that tensors of this process are in, a GPU or the host, and how they are lent from there."""

    @property
    def place(self) -> str:
        """The GPU's UUID as SGLang's torch spells it; empty for the host."""
        ...

    def lend(self, tensors: "Mapping[str, torch.Tensor]", *, keep: bool = False) -> Lent:
        """Lend tensors to one process, which counts as holding them until it gives back or is written off.

        With `keep` it will hold them for longer than a push.

        Raises:
            WeightsError: this memory cannot be shared with another process.
        """
        ...

    def empty(self, nbytes: int) -> "torch.Tensor":
        """Bytes that can be lent, without values.

        Raises:
            WeightsError: there is no room.
        """
        ...

    def free_bytes(self) -> int | None:
        """Bytes that `empty` may give now; None if that is not known."""
        ...

    def synchronize(self) -> None:
        """Wait for all work on this memory that was begun before."""
        ...

    def collect(self) -> None:
        """Free what came back."""
        ...


class Lease:
    """What was lent to one server for one push."""

    def __init__(self, target: Target, counters: Sequence[Counter]) -> None:
        self.server = target.server
        self._incarnation = target.incarnation
        self._counters = list(counters)

    def is_of_an_earlier_start(self, target: Target) -> bool:
        """Whether it was lent to a process that the server at this address has replaced."""
        known = self._incarnation and target.incarnation
        return self.server == target.server and bool(known) and self._incarnation != target.incarnation

    def add(self, counters: Sequence[Counter]) -> None:
        """More that was lent with it."""
        self._counters += counters

    def is_back(self) -> bool:
        """Whether the server has given back all of it."""
        self._counters = [counter for counter in self._counters if not counter.is_back()]
        return not self._counters

    def wait(self, timeout_s: float = RETURN_S) -> bool:
        """Wait until all is back; False if it is not in time."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = _POLL_FIRST_S
        while not self.is_back():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        return True

    def write_off(self) -> None:
        """Count all of it as back."""
        for counter in self._counters:
            counter.write_off()
        self._counters = []


@contextmanager
def lending(target: Target) -> Iterator[Lease]:
    """A lease to be filled. If that fails, nothing was offered yet, and what was lent counts as back."""
    lease = Lease(target, [])
    try:
        yield lease
    except BaseException:
        lease.write_off()
        raise


class Ledger:
    """The open leases of a source. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Lease] = []

    @contextmanager
    def _held(self) -> Iterator[list[Lease]]:
        with self._lock:
            yield self._open

    def issue(self, lease: Lease) -> None:
        """Enter a lease."""
        with self._held() as leases:
            leases.append(lease)

    def returned(self, lease: Lease) -> None:
        """Strike out a lease whose memory is back. Idempotent."""
        with self._held() as leases:
            if lease in leases:
                leases.remove(lease)

    def require_back(self, lease: Lease, timeout_s: float = RETURN_S) -> None:
        """Wait for a lease, and strike it out.

        Raises:
            WeightsError: the server still holds memory of this process. The lease stays open.
        """
        if not lease.wait(timeout_s):
            raise WeightsError(
                f"{lease.server} has answered and still holds memory of the sender after {timeout_s:g} s:"
                " keep the tensors as they are, and restart that server"
            )
        self.returned(lease)

    def write_off(self, lease: Lease) -> None:
        """Count a lease as back: its server has not taken it, or is gone."""
        lease.write_off()
        self.returned(lease)

    def write_off_earlier(self, target: Target) -> None:
        """A process that was replaced gives nothing back: count what was lent to it as back."""
        with self._held() as leases:
            gone = [lease for lease in leases if lease.is_of_an_earlier_start(target)]
        for lease in gone:
            self.write_off(lease)

    @property
    def open(self) -> tuple[str, ...]:
        """The server of each open lease."""
        with self._held() as leases:
            leases[:] = [lease for lease in leases if not lease.is_back()]
            return tuple(lease.server for lease in leases)
