"""The words of a registered push: what the sender orders, and where the server's loader answers.

An order travels as the first named tensor of a push to the loader: JSON, as bytes. The answer comes through
the control block, eight 64-bit words in the sender's memory that the server maps. Both sides use this module.
"""

import hmac
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

ORDER = "refitfsm.order"
"""The first name of an order's push: a 1-D tensor of uint8, the JSON of an `Order`."""
CONTROL = "refitfsm.control"
"""The second name of a registration: the control block, a 1-D tensor of `CONTROL_WORDS` int64. The weights
follow. The other orders carry `ORDER` alone."""

ORDER_BYTES_MAX = 512
CONTROL_WORDS = 8
MAGIC = int.from_bytes(b"refitfsm", "big")
"""What the sender writes at `MAGIC_AT`. Where it is not, something else lies there now."""

MAGIC_AT, REVOKED_AT, SEQ_AT, STATUS_AT, REASON_AT, COPIES_AT, BYTES_AT = range(7)
"""Where a control block has what. The sender writes the first two: at `REVOKED_AT` 1, once nothing may be
copied any more. The server writes the others, and the order's `seq` last: before it has moved, they speak of
an earlier order. `COPIES_AT` and `BYTES_AT` count what one replay copies."""


class Status(IntEnum):
    """What became of an order. 0 in the control block: nothing yet."""

    REGISTERED = 1
    """The weights were loaded, and can be copied again at a word."""
    LOADED = 2
    """The weights were loaded, and the model does not allow more: the reason says why. Nothing is held."""
    REPLAYED = 3
    """All recorded copies were made again, and are done."""
    VOID = 4
    """Nothing was copied, and nothing is held any more: the reason says why."""


class Answer(NamedTuple):
    """What a server writes about an order."""

    status: int
    reason: int = 0
    copies: int = 0
    nbytes: int = 0


class Words(NamedTuple):
    """A control block as the server finds it when an order comes."""

    is_sound: bool
    """It is a control block."""
    is_revoked: bool
    answer: Answer | None
    """What is written about this very order already, for another model of the same process."""

    @classmethod
    def read(cls, words: Sequence[int], seq: int) -> "Words":
        """Of the eight words, for the order of that `seq`."""
        answer = Answer(*words[STATUS_AT : BYTES_AT + 1]) if words[SEQ_AT] == seq else None
        return cls(words[MAGIC_AT] == MAGIC, words[REVOKED_AT] != 0, answer)

    def together(self, other: Answer) -> Answer:
        """One answer for this model and the one before: the worse of the two, and all that was copied."""
        if self.answer is None:
            return other
        is_bad = self.answer.status in {Status.LOADED, Status.VOID}
        worse = self.answer if is_bad else other
        copies, nbytes = self.answer.copies + other.copies, self.answer.nbytes + other.nbytes
        return Answer(worse.status, worse.reason, copies, nbytes)


class Reason(IntEnum):
    """Why a status is no better."""

    NONE = 0
    UNKNOWN = 1
    REVOKED = 2
    SENDER_DEAD = 3
    OTHER_MODEL = 4
    PARAMETERS_MOVED = 5
    SOURCES_CONVERTED = 6
    SOURCE_NOT_COPIED = 7
    WRITTEN_OTHERWISE = 8
    LOADED_IN_ANOTHER_THREAD = 9
    PARAMETERS_READ = 10
    NOT_MAPPED = 11
    NOT_FOLLOWED = 12
    FORGOTTEN = 13


_TEXTS = {
    Reason.NONE: "nothing is the matter",
    Reason.UNKNOWN: "the server holds no such registration",
    Reason.REVOKED: "the sender has revoked the registration",
    Reason.SENDER_DEAD: "the process that registered the weights is gone",
    Reason.OTHER_MODEL: "the registration was made for another model object",
    Reason.PARAMETERS_MOVED: "a parameter of the model has another address, shape or dtype than before",
    Reason.SOURCES_CONVERTED: "the model transforms or quantises the weights instead of copying them",
    Reason.SOURCE_NOT_COPIED: "the model copies nothing from some pushed tensor: tied, ignored, not its part",
    Reason.WRITTEN_OTHERWISE: "the model writes or replaces a parameter by something else than a copy",
    Reason.LOADED_IN_ANOTHER_THREAD: "the model loads in threads of its own, which cannot be followed",
    Reason.PARAMETERS_READ: "the model makes further weights from its parameters while it loads",
    Reason.NOT_MAPPED: "the pushed tensors were copied on their way: they are not on the rank's device",
    Reason.NOT_FOLLOWED: "the loader could not follow what the model did with the weights",
    Reason.FORGOTTEN: "the sender had the registration forgotten",
}


def reason_text(code: int) -> str:
    """What the word at `REASON_AT` means, in one line."""
    try:
        return _TEXTS[Reason(code)]
    except ValueError:
        return f"the server gives reason {code}, which this version does not know"


Kind: TypeAlias = Literal["register", "replay", "forget"]
_KINDS = frozenset(get_args(Kind))
_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Order:
    """What a sender wants of a server's loader."""

    kind: str
    """A `Kind`."""
    registration: str
    """32 hexadecimal digits, new for each registration."""
    secret: str
    """32 hexadecimal digits that only the sender and the server know."""
    seq: int
    """Above that of every earlier order of the registration: a replay is made once."""
    pid: int
    """The sender's process id, as the sender sees it."""
    started: int
    """When that process began, see `started_at`; 0 if the sender cannot tell."""

    def encode(self) -> bytes:
        """The order as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> "Order | None":
        """The order that `encode` gave these bytes for; None for any other bytes."""
        if len(data) > ORDER_BYTES_MAX:
            return None
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or fields.keys() != _TYPES.keys():
            return None
        if any(type(fields[name]) is not kind for name, kind in _TYPES.items()):
            return None
        order = Order(**fields)
        return order if order._is_sound() and order.encode() == data else None

    def is_of(self, registration: "Order") -> bool:
        """Whether this order is about a registration, and its sender knows the secret."""
        known = self.registration == registration.registration
        return known and hmac.compare_digest(self.secret, registration.secret)

    def sender_is_seen(self) -> bool:
        """Whether the process that the order names as its sender runs, seen from here."""
        return started_at(self.pid) == self.started

    def _is_sound(self) -> bool:
        return (
            self.kind in _KINDS
            and _TOKEN.fullmatch(self.registration) is not None
            and _TOKEN.fullmatch(self.secret) is not None
            and 0 < self.seq < 1 << 63
            and 0 <= self.pid < 1 << 31
            and 0 <= self.started < 1 << 63
        )


_TYPES: dict[str, type] = {
    "kind": str,
    "registration": str,
    "secret": str,
    "seq": int,
    "pid": int,
    "started": int,
}


def started_at(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since the machine did; None if it does not run.

    With its id that is one process and no other, in whichever namespace of process ids it is looked up.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if state in b"ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None
