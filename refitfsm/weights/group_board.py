"""What the leader and the ranks tell each other through the store.

Each value has one writer, who writes it anew: the leader its order, a rank its report. So nothing has to
be cleared away after a refit that failed, and a rank that comes late reads the truth. An order is written
over when all ranks that it is for have reported on it. A value that changes nothing but its `beat` says
that its writer is alive and waits for the others.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from enum import StrEnum
from typing import TypeVar

import msgspec

from refitfsm.weights.group_base import GroupError, RankGroup
from refitfsm.weights.group_hand import Hand

BEAT_S = 0.25
"""How often a rank that is at work, or a leader that waits for one, says so."""
REASON_MAX = 1000
"""Characters of an error that are passed on."""

T = TypeVar("T")


class Do(StrEnum):
    """What the leader can order."""

    JOIN = "join"
    """Say which GPU and which tensors you have."""
    READY = "ready"
    """Let go of the last chunk, and be here for the next: a collective follows."""
    MAKE = "make"
    """Gather the chunk, if you have not; then make an entry, if you are one of the makers."""
    SETTLE = "settle"
    WITHDRAW = "withdraw"
    DONE = "done"
    """The refit is over."""
    FAILED = "failed"
    """The refit has failed for all ranks."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's value."""

    epoch: int
    """Refits of this group, counted from 1."""
    seq: int = 0
    do: Do = Do.JOIN
    ranks: tuple[int, ...] = ()
    """Who is to report."""
    chunk: int = 0
    makers: tuple[int, ...] = ()
    """make: who is to make an entry."""
    offer: int = 0
    """make, settle, withdraw: the entries' number."""
    version: int | None = None
    """done: what the servers serve now."""
    reason: str = ""
    """failed: because of which rank, and why."""
    beat: int = 0

    @property
    def ends(self) -> bool:
        """Whether nothing follows in this refit."""
        return self.do in {Do.DONE, Do.FAILED}


class State(StrEnum):
    """How far a rank is with an order."""

    WORKING = "working"
    DONE = "done"
    FAILED = "failed"
    """The rank has left the refit, whatever the order."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's value."""

    epoch: int = 0
    seq: int = 0
    state: State = State.DONE
    missed: int = 0
    """How many refits the leader did not begin in time, since this one."""
    gpu: str | None = None
    """join: the UUID, bare; None is the CPU."""
    digest: str = ""
    """join: of the manifest."""
    load_format: str | None = None
    """make: of the entry."""
    entry_bytes: int = 0
    """make: how long it is."""
    applied: bool = True
    """settle."""
    note: str = ""
    """settle."""
    reason: str = ""
    """failed."""
    begun: int = 0
    """working: collectives begun, ever."""
    beat: int = 0


class Board:
    """The store, as this rank uses it. From any thread.

    Every method raises `GroupError` when the store fails, or takes longer than `timeout_s`; then all do.
    """

    def __init__(self, group: RankGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._hand = Hand(f"{group.name}-store")
        self._known: set[str] = set()
        self._broken: str | None = None

    def write_order(self, order: Order) -> None:
        """The leader's."""
        self._write("order", msgspec.json.encode(order).decode())

    def read_order(self) -> Order:
        """The last one; of epoch 0 where none was ever given."""
        value = self._read("order")
        return Order(epoch=0, do=Do.DONE) if value is None else msgspec.json.decode(value, type=Order)

    def write_report(self, report: Report) -> None:
        """This rank's."""
        self._write(f"report/{self._group.rank}", msgspec.json.encode(report).decode())

    def read_report(self, rank: int) -> Report:
        """A rank's last one; of epoch 0 where it never gave one."""
        value = self._read(f"report/{rank}")
        return Report() if value is None else msgspec.json.decode(value, type=Report)

    def write_names(self, names: Sequence[str]) -> None:
        """The chunk that the next order is about."""
        self._write("names", msgspec.json.encode(names).decode())

    def read_names(self) -> tuple[str, ...]:
        """See `write_names`."""
        return msgspec.json.decode(self._read("names") or b"[]", type=tuple[str, ...])

    def put_entry(self, entry: bytes) -> None:
        """This rank's entry, to be taken once."""
        self._write(f"entry/{self._group.rank}", entry.decode("ascii"))

    def take_entry(self, rank: int) -> bytes:
        """A rank's entry, which is gone afterwards; empty if there is none."""
        key, store = self._key(f"entry/{rank}"), self._group.store

        def take() -> bytes:
            if not store.check([key]):
                return b""
            entry = bytes(store.get(key))
            store.delete_key(key)
            return entry

        return self._bounded(take)

    def close(self) -> None:
        """Let go of the store."""
        self._hand.close()

    def _key(self, key: str) -> str:
        return f"{self._group.name}/{key}"

    def _write(self, key: str, value: str) -> None:
        self._bounded(lambda: self._group.store.set(self._key(key), value))

    def _read(self, key: str) -> bytes | None:
        key, store = self._key(key), self._group.store

        def read() -> bytes | None:
            # What was there once is never deleted, so `get` will not wait.
            if key not in self._known and not store.check([key]):
                return None
            self._known.add(key)
            return bytes(store.get(key))

        return self._bounded(read)

    def _bounded(self, work: Callable[[], T]) -> T:
        if self._broken is None:
            future = self._hand.start(work)
            if not wait({future}, self._timeout_s).done:
                self._broken = f"no answer within {self._timeout_s:g} s"
            elif error := future.exception():
                self._broken = first_line(error)
            else:
                return future.result()
        raise GroupError(
            f"the store is gone ({self._broken}): whoever keeps it, most often rank {self._group.leader},"
            " the leader, has ended or hangs"
        )


def first_line(error: BaseException) -> str:
    """An error as one line of bounded length, for those who cannot see it."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:REASON_MAX]
