"""Who takes part when many trainer ranks push to one fleet, and what each of them brings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.offer import Settled

if TYPE_CHECKING:
    import torch


class GroupError(WeightsError):
    """A refit that failed for all ranks, because of one. The message names it and says what it met.

    Where ranks were in the middle of a collective, they stay there: abort the process group, or end the
    processes, before its next use.
    """


class KeyValueStore(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value; waits until there is one."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these have a value."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Delete a value; whether there was one."""
        ...


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a trainer that push together, as one of them sees it.

    `store` is shared by all. `leader` is the rank that has the fleet. Groups that share a store need names
    of their own. The store keeps two values for each rank, and no more however many refits there are.

    Raises:
        WeightsError: a rank is not one of the group.
    """

    store: KeyValueStore
    rank: int
    size: int
    leader: int = 0
    name: str = "refitfsm"

    def __post_init__(self) -> None:
        for role, rank in (("rank", self.rank), ("leader", self.leader)):
            if not 0 <= rank < self.size:
                raise WeightsError(f"{role} {rank} is not in a group of {self.size}: count from 0")

    @classmethod
    def of(cls, process_group: "torch.distributed.ProcessGroup", *, leader: int = 0) -> "RankGroup":
        """The ranks of a process group of torch. `leader` is counted within it.

        Raises:
            WeightsError: this torch does not give out a group's store.
        """
        get_store = getattr(process_group, "get_group_store", None)
        if get_store is None:
            raise WeightsError("this torch does not give out a group's store: RankGroup(TCPStore(...), ...)")
        return cls(get_store(), int(process_group.rank()), int(process_group.size()), leader)

    @classmethod
    def from_default(cls, *, leader: int = 0) -> "RankGroup":
        """The ranks of the default process group.

        Raises:
            WeightsError: there is none, or as in `of`.
        """
        import torch.distributed as dist  # noqa: PLC0415 - the package must import without torch

        world = dist.group.WORLD if dist.is_initialized() else None
        if world is None:
            raise WeightsError("there is no process group: call torch.distributed.init_process_group first")
        return cls.of(world, leader=leader)

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks beside the leader, in order."""
        return tuple(rank for rank in range(self.size) if rank != self.leader)

    @property
    def pause_max_s(self) -> float:
        """The longest time between two looks at the store: it gets no more than 5,000 questions a second."""
        return 0.005 + self.size / 5_000


class LocalEntry(Protocol):
    """One rank's entry for one push to one server, and the memory that it lends out."""

    @property
    def entry(self) -> bytes:
        """An element of `serialized_named_tensors`: base64 as ASCII bytes."""
        ...

    @property
    def load_format(self) -> str | None:
        """SGLang's `load_format` of the entry, the same on every rank."""
        ...

    def settle(self) -> Settled:
        """See `Offer.settle`."""
        ...

    def withdraw(self) -> None:
        """See `Offer.withdraw`."""
        ...


Encode: TypeAlias = "Callable[[Sequence[tuple[str, torch.Tensor]]], LocalEntry]"
"""Makes the entry of a chunk for one consumer. What it lends out, it must keep alive until it is settled."""
