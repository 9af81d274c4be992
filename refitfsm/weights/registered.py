"""The registered push: the server's loader keeps the mapped weights, and copies them again at a word.

A registration is a server's, and lasts while its process lives, the sender's tensors stay where they are,
and nobody revokes it. Whether it still holds is for the loader to say, in a block of this process's
memory that it writes to; a push that it turns down is followed by one of everything.
"""

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from refitfsm.server import LOADER, protocol
from refitfsm.server.protocol import Order, Status
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.handles import (
    Replica,
    encoded,
    list_offer,
    named_values,
    replica_of,
    synchronize,
)
from refitfsm.weights.lending import Lease, Ledger, lending
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.offer import Offer, Settled, Target
from refitfsm.weights.opcodes import Value
from refitfsm.weights.payload import cpu_payload, tensor_value

if TYPE_CHECKING:
    import torch


LET_GO_S = 0.5
"""How long to wait for a loader that says it has let go."""

Lies: TypeAlias = Sequence[Mapping[str, tuple[object, ...]]]
"""How the tensors of each replica lie, by name: as long as they stay so, a mapping shows them."""


@dataclass
class _Registration:
    name: str
    secret: str
    controls: "tuple[torch.Tensor, ...]"
    """A block of control words for each rank."""
    lies: Lies
    """How the tensors lie that the server has mapped."""
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
        """See `Offer.withdraw`."""
        self._withdraw()


class Registrations:
    """The registrations of a source's tensors, one for each server."""

    def __init__(self, replicas: Sequence[Replica], names: Sequence[str], ledger: Ledger) -> None:
        self._replicas = replicas
        self._names = names
        self._ledger = ledger
        self._lock = threading.Lock()
        self._open: dict[str, _Registration] = {}
        self._why_full: dict[tuple[str, str], str] = {}
        """Servers, with their start, whose loading cannot be replayed, and why."""

    def offer(self, target: Target, lies: Lies) -> Offer:
        """A word if the server is registered; else everything, to be kept. `lies` says how all tensors lie.

        Raises:
            WeightsError: see `list_offer`.
        """
        why_full = self._why_full.get((target.server, target.incarnation))
        if why_full is not None:
            return list_offer(target, self._replicas, self._names, self._ledger, f"in full: {why_full}")
        chosen = [replica_of(self._replicas, rank) for rank in target.ranks]
        synchronize(chosen)
        with self._lock:
            known = self._open.get(target.server)
        if known is None:
            return self._register(target, chosen, lies, "")
        if known.lease.is_of_an_earlier_start(target):
            self._ledger.write_off(known.lease)
            return self._register(target, chosen, lies, "the server was started again")
        if known.lies != lies:
            return self._register(target, chosen, lies, "the sender's tensors have moved", known)
        return self._replay(target, known)

    def require_none(self) -> None:
        """Whether no server keeps these tensors mapped.

        torch opens an allocation that is mapped already no second time, and counts a loan of it down at once
        instead of after the copies: the end of the count would prove nothing.

        Raises:
            WeightsError: a server does.
        """
        with self._lock:
            servers = ", ".join(sorted(self._open))
        if servers:
            raise WeightsError(
                f"{servers} keeps these tensors mapped from a registered push, and no other can be proved"
                " beside it: go on with push_strategy = registered, or end it with a refit after"
                " forget_after_refit()"
            )

    def _replay(self, target: Target, known: _Registration) -> RegisteredOffer:
        known.seq += 1
        entry = _word(known.order("replay"))

        def settle() -> Settled:
            answers = known.answers()
            if all(answer.status is Status.REPLAYED for answer in answers):
                return Settled(applied=True, note="replayed")
            self._forget(target.server, known)
            reasons = sorted({answer.reason for answer in answers if answer.status is not Status.REPLAYED})
            return Settled(applied=False, note=f"not replayed: {'; '.join(reasons)}")

        # A word that was not taken changes nothing: whether the registration holds, the next one shows.
        return RegisteredOffer((entry,) * len(target.ranks), settle, lambda: None)

    def _register(
        self,
        target: Target,
        chosen: Sequence[Replica],
        lies: Lies,
        why: str,
        former: _Registration | None = None,
    ) -> RegisteredOffer:
        controls = tuple(_control(replica) for replica in chosen)
        entries = []
        with lending(target) as lease:
            new = _Registration(secrets.token_hex(16), secrets.token_hex(16), controls, lies, lease)
            order = new.order("register")
            for replica, control in zip(chosen, controls, strict=True):
                tensors = {name: replica.tensors[name] for name in self._names}
                lent = replica.memory.lend({protocol.CONTROL: control, **tensors}, keep=True)
                lease.add(lent.counters)
                entries.append(encoded([(protocol.ORDER, _order_value(order)), *named_values(lent)]))
        self._ledger.issue(lease)

        def settle() -> Settled:
            answers = new.answers()
            if former is not None:  # the loader drops it for the new one
                self._forget(target.server, former)
            if all(answer.status is Status.REGISTERED for answer in answers):
                with self._lock:
                    self._open[target.server] = new
                return Settled(applied=True, note=f"registered{': ' + why if why else ''}")
            new.revoke()
            if any(answer.status is None for answer in answers):
                raise WeightsError(
                    f"{target.server} took the weights and did not answer through their memory: start it with"
                    f" --custom-weight-loader {LOADER} of this version, or set push_strategy = list"
                )
            reason = next(answer.reason for answer in answers if answer.status is not Status.REGISTERED)
            self._why_full[target.server, target.incarnation] = reason
            self._ledger.require_back(lease)
            return Settled(applied=True, note=f"in full: {reason}")

        return RegisteredOffer(tuple(entries), settle, lambda: self._ledger.write_off(lease))

    def forget(self, target: Target) -> RegisteredOffer:
        """A word after which the server holds no registration of these tensors."""
        with self._lock:
            known = self._open.get(target.server)
        if known is None:  # nothing was kept there, and every chunk is a push
            stray = Order("forget", secrets.token_hex(16), secrets.token_hex(16), 1, 0, 0)
            entry = _word(stray.encode())
            nothing = Settled(applied=True, note="nothing was registered")
            return RegisteredOffer((entry,) * len(target.ranks), lambda: nothing, lambda: None)
        known.seq += 1
        entry = _word(known.order("forget"))

        def settle() -> Settled:
            said = all(answer.status is Status.VOID for answer in known.answers())
            self._forget(target.server, known)
            note = "forgotten" if said else "the server had forgotten it before"
            held = "" if known.lease.is_back() else ", and it still holds memory of the sender"
            return Settled(applied=True, note=note + held)

        return RegisteredOffer((entry,) * len(target.ranks), settle, lambda: None)

    def _forget(self, server: str, known: _Registration) -> None:
        """Hold a registration for gone. Its memory counts as lent until the server has let go of it."""
        known.revoke()
        with self._lock:
            if self._open.get(server) is known:
                del self._open[server]
        if known.lease.wait(LET_GO_S):
            self._ledger.returned(known.lease)

    def close(self) -> None:
        """Revoke all: no loader copies from this memory again."""
        with self._lock:
            known, self._open = list(self._open.values()), {}
        for registration in known:
            registration.revoke()
        synchronize(self._replicas)


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
