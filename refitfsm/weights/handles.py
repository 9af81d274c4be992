"""Offers of tensors where they lie: the server maps this process's memory and copies from there."""

import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.lending import Lease, Ledger, Lent, Memory, lending
from refitfsm.weights.offer import RankPlace, Settled, Target
from refitfsm.weights.opcodes import Value, pickle_pieces

if TYPE_CHECKING:
    import torch


class Replica(NamedTuple):
    """All tensors in one place."""

    memory: Memory
    tensors: "dict[str, torch.Tensor]"


class LentOffer:
    """Entries that lend out memory, until the server has given it back."""

    def __init__(
        self,
        entries: tuple[bytes, ...],
        load_format: str | None,
        lease: Lease,
        ledger: Ledger,
        *,
        places: Sequence[Memory],
        note: str = "",
    ) -> None:
        self.entries = entries
        self.load_format = load_format
        self._lease = lease
        self._ledger = ledger
        self._places = places
        self._note = note
        ledger.issue(lease)

    def settle(self) -> Settled:
        """See `Offer.settle`."""
        self._ledger.require_back(self._lease)
        self._collect()
        return Settled(applied=True, note=self._note)

    def withdraw(self) -> None:
        """See `Offer.withdraw`."""
        self._ledger.write_off(self._lease)
        self._collect()

    def _collect(self) -> None:
        for memory in self._places:
            memory.collect()


def list_offer(
    target: Target, replicas: Sequence[Replica], names: Sequence[str], ledger: Ledger, note: str = ""
) -> LentOffer:
    """The named tensors as they lie, for each rank those of its own place.

    Raises:
        WeightsError: a rank has no tensors on its GPU, or memory cannot be shared.
    """
    chosen = [replica_of(replicas, rank) for rank in target.ranks]
    synchronize(chosen)
    entries = []
    with lending(target) as lease:
        for replica in chosen:
            lent = replica.memory.lend({name: replica.tensors[name] for name in names})
            lease.add(lent.counters)
            entries.append(encoded(named_values(lent)))
    places = [replica.memory for replica in chosen]
    return LentOffer(tuple(entries), None, lease, ledger, places=places, note=note)


def synchronize(replicas: Sequence[Replica]) -> None:
    """Wait until what the tensors are to hold is there: handles carry no event."""
    for memory in {replica.memory.place: replica.memory for replica in replicas}.values():
        memory.synchronize()


def named_values(lent: Lent) -> list[Value]:
    """What a server unpickles to a list of named tensors."""
    return [(name, value) for name, value in lent.values.items()]


def encoded(value: Value) -> bytes:
    """One entry of `serialized_named_tensors`."""
    return binascii.b2a_base64(b"".join(pickle_pieces(value)), newline=False)


def replica_of(replicas: Sequence[Replica], rank: RankPlace) -> Replica:
    """The tensors that lie where a rank can map them.

    Raises:
        WeightsError: there are none on its GPU, or its GPU is not known and there are several.
    """
    if rank.gpu_uuid is None:
        if len(replicas) > 1:
            raise WeightsError(
                f"the tensors are on {len(replicas)} GPUs and the GPU of rank {rank.tp_rank} is not known:"
                " name the server's GPUs, ServerSpec(url, gpus=...)"
            )
        return replicas[0]
    for replica in replicas:
        if not replica.memory.place or _bare(replica.memory.place) == _bare(rank.gpu_uuid):
            return replica
    have = ", ".join(replica.memory.place for replica in replicas)
    if not rank.gpu_uuid:
        raise WeightsError(f"rank {rank.tp_rank} is on the CPU, the tensors are on {have}: give CPU tensors")
    raise WeightsError(
        f"rank {rank.tp_rank} is on GPU {rank.gpu_uuid}, the tensors are on {have}:"
        " give tensors of the rank's own GPU too, or CPU tensors"
    )


def require_places(replicas: Sequence[Replica], target: Target) -> None:
    """Whether every rank of a server can map tensors of its own place. One that cannot dies of the push.

    Raises:
        WeightsError: a rank cannot; the message names it, and its server.
    """
    try:
        for rank in target.ranks:
            replica_of(replicas, rank)
    except WeightsError as error:
        raise WeightsError(f"{target.server}: {error}") from None


def _bare(uuid: str) -> str:
    return uuid.strip().lower().removeprefix("gpu-")
