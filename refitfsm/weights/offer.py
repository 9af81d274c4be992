"""What is offered to one server in one push, and what has to come back of it.

An offer of bytes is done with when it is sent. An offer of handles lends out memory of this process: the
server has to be through with it before anybody may write there, and an answer of 200 does not prove that.
"""

from typing import NamedTuple, Protocol


class RankPlace(NamedTuple):
    """One tensor-parallel rank of a server, as far as it is known."""

    tp_rank: int
    gpu_uuid: str | None
    """The rank's GPU, with or without `GPU-` in front; empty if it computes on the CPU; None if unknown."""


class Target(NamedTuple):
    """The server that a push is for."""

    server: str
    """The address it is known by."""
    ranks: tuple[RankPlace, ...]
    """In rank order, each rank once."""
    incarnation: str = ""
    """Differs between two starts of the server; empty if that is not known."""


class Settled(NamedTuple):
    """What an offer has come to, after the server said that it took it."""

    applied: bool
    """False: it is proved that nothing was written. Another offer may be made."""
    note: str = ""
    """What somebody who reads the audit should know."""


class Offer(Protocol):
    """The entries of one push to one server, and the memory they lend out.

    After an answer of 200 call `settle`, otherwise `withdraw`. Each may take a while: not on an event loop.
    """

    @property
    def load_format(self) -> str | None:
        """SGLang's `load_format` of these entries; None is its default, a list of named tensors."""
        ...

    @property
    def entries(self) -> tuple[bytes, ...]:
        """`serialized_named_tensors`: base64 as ASCII bytes, one for each rank, in rank order."""
        ...

    def settle(self) -> Settled:
        """Prove that the server is through with what was lent.

        Raises:
            WeightsError: it has answered, and still holds on to memory of this process.
        """
        ...

    def withdraw(self) -> None:
        """Take back what was lent to a server that certainly did not take it, or is gone. Idempotent.

        Where a server may still read what was lent, call neither: the lease stays open until it is back.
        """
        ...


class BytesOffer(NamedTuple):
    """An offer that carries its bytes and lends nothing."""

    entries: tuple[bytes, ...]
    load_format: str | None = None

    def settle(self) -> Settled:
        """See `Offer.settle`: there is nothing to come back."""
        return Settled(applied=True)

    def withdraw(self) -> None:
        """See `Offer.withdraw`."""
