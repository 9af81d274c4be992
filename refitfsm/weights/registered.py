"""The registered push: the server's loader keeps the mapped weights, and copies them again at a word.

A registration is a server's, and lasts while its process lives, the sender's tensors stay where they are,
and nobody revokes it. Whether it still holds is for the loader to say, in a block of this process's
memory that it writes to; a push that it turns down is followed by one of everything.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from refitfsm.server import LOADER, protocol
from refitfsm.server.protocol import Order, Status
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.handles import (
    GONE_S,
    Replica,
    encoded,
    lend_all,
    list_offer,
    replica_of,
    synchronize,
)
from refitfsm.weights.lending import Lease, Ledger
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.offer import Offer, Settled, Target
from refitfsm.weights.opcodes import Value
from refitfsm.weights.payload import cpu_payload, tensor_value

if TYPE_CHECKING:
    import torch


@dataclass
class _Registration:
    name: str
    secret: str
    controls: "tuple[torch.Tensor, ...]"
    """A block of control words for each rank."""
    addresses: tuple[int, ...]
    """Where the tensors are that the server has mapped."""
    lease: Lease
    seq: int = 1

    def order(self, kind: str) -> bytes:
        pid = os.getpid()
        return Order(kind, self.name, self.secret, self.seq, pid, protocol.started_at(pid) or 0).encode()

    def answers(self) -> "list[_Answer]":
        return [_Answer.read(control, self.seq) for control in self.controls]

    def revoke(self) -> None:
        for control in self.controls:
            control[protocol.REVOKED_AT] = 1


class _Answer(NamedTuple):
    """What one rank's loader wrote."""

    status: Status | None
    """None: nothing, about this order."""
    reason: str

    @classmethod
    def read(cls, control: "torch.Tensor", seq: int) -> "_Answer":
        words: list[int] = control.tolist()
        if words[protocol.SEQ_AT] != seq:
            return cls(None, "the server does not know the registration")
        return cls(Status(words[protocol.STATUS_AT]), protocol.reason_text(words[protocol.REASON_AT]))


class RegisteredOffer:
    """An offer whose outcome the loader writes into this process's memory."""

    load_format: str | None = LOADER

    def __init__(
        self, entries: tuple[bytes, ...], settle: Callable[[], Settled], withdraw: Callable[[], None]
    ) -> None:
        self.entries = entries
        self._settle = settle
        self._withdraw = withdraw

    def settle(self) -> Settled:
        """See `Offer.settle`: the loader has waited for its copies before it wrote."""
        return self._settle()

    def withdraw(self) -> None:
        """See `Offer.withdraw`: the server will be registered anew."""
        self._withdraw()


class Registrations:
    """The registrations of a source's tensors, one for each server."""

    def __init__(self, replicas: Sequence[Replica], names: Sequence[str], ledger: Ledger) -> None:
        self._replicas = replicas
        self._names = names
        self._ledger = ledger
        self._open: dict[str, _Registration] = {}
        self._why_full: dict[str, str] = {}
        """Servers whose loading cannot be replayed, and why."""

    def offer(self, target: Target) -> Offer:
        """A word if the server is registered; else everything, to be kept.

        Raises:
            WeightsError: see `list_offer`.
        """
        if target.server in self._why_full:
            note = f"in full: {self._why_full[target.server]}"
            return list_offer(target, self._replicas, self._names, self._ledger, note)
        chosen = [replica_of(self._replicas, rank) for rank in target.ranks]
        synchronize(chosen)
        addresses = tuple(replica.tensors[name].data_ptr() for replica in chosen for name in self._names)
        known = self._open.get(target.server)
        if known is not None and known.lease.is_of_an_earlier_start(target):
            self._drop(target.server)
            return self._register(target, chosen, addresses, "the server was started again")
        if known is None:
            return self._register(target, chosen, addresses, "")
        if known.addresses != addresses:
            self._drop(target.server)
            return self._register(target, chosen, addresses, "the sender's tensors have moved")
        return self._replay(target, known)

    def _replay(self, target: Target, known: _Registration) -> RegisteredOffer:
        known.seq += 1
        entry = _word(known.order("replay"))

        def settle() -> Settled:
            answers = known.answers()
            if all(answer.status is Status.REPLAYED for answer in answers):
                return Settled(applied=True, note="replayed")
            self._drop(target.server)
            reasons = sorted({answer.reason for answer in answers if answer.status is not Status.REPLAYED})
            return Settled(applied=False, note=f"not replayed: {'; '.join(reasons)}")

        return RegisteredOffer((entry,) * len(target.ranks), settle, lambda: self._drop(target.server))

    def _register(
        self, target: Target, chosen: Sequence[Replica], addresses: tuple[int, ...], why: str
    ) -> RegisteredOffer:
        controls = tuple(_control(replica) for replica in chosen)
        lease = Lease(target, [])
        new = _Registration(secrets.token_hex(16), secrets.token_hex(16), controls, addresses, lease)
        order = new.order("register")
        entries = []
        for replica, control in zip(chosen, controls, strict=True):
            lent = replica.memory.lend(protocol.CONTROL, control)
            named, counters = lend_all(replica, self._names)
            entries.append(
                encoded([(protocol.ORDER, _order_value(order)), (protocol.CONTROL, lent.value), *named])
            )
            lease.add([*counters, *([lent.counter] if lent.counter is not None else [])])
        self._ledger.issue(lease)
        self._open[target.server] = new

        def settle() -> Settled:
            answers = new.answers()
            if all(answer.status is Status.REGISTERED for answer in answers):
                return Settled(applied=True, note=f"registered{': ' + why if why else ''}")
            del self._open[target.server]
            if any(answer.status is None for answer in answers):
                raise WeightsError(
                    f"{target.server} took the weights and did not answer through their memory: start it with"
                    f" --custom-weight-loader {LOADER} of this version, or set push_strategy = list"
                )
            reason = next(answer.reason for answer in answers if answer.status is not Status.REGISTERED)
            self._why_full[target.server] = reason
            self._ledger.require_back(lease)
            return Settled(applied=True, note=f"in full: {reason}")

        return RegisteredOffer(tuple(entries), settle, lambda: self._drop(target.server))

    def _drop(self, server: str) -> None:
        """Forget a registration: its server has dropped it, or is gone."""
        known = self._open.pop(server, None)
        if known is not None:
            known.revoke()
            known.lease.wait(GONE_S)
            self._ledger.write_off(known.lease)

    def close(self) -> None:
        """Revoke all: no loader copies from this memory again."""
        for known in self._open.values():
            known.revoke()
        synchronize(self._replicas)
        self._open.clear()


def _control(replica: Replica) -> "torch.Tensor":
    import torch  # noqa: PLC0415 - the package must import without torch

    control = replica.memory.empty(protocol.CONTROL_WORDS * 8).view(torch.int64)
    control.zero_()
    control[protocol.MAGIC_AT] = protocol.MAGIC
    return control


def _order_value(order: bytes) -> Value:
    return tensor_value(TensorSpec.of(protocol.ORDER, "U8", (len(order),)), order)


def _word(order: bytes) -> bytes:
    return cpu_payload([(TensorSpec.of(protocol.ORDER, "U8", (len(order),)), order)])
