"""A line of the journal, and what is in it.

A line is `{"hash":"H","body":B}` where H is the SHA-256 of the previous line's hash followed by the
bytes of B: a line that is edited, dropped, repeated or moved breaks the chain. The first body is the
header, with the schema's version, the run, and the policy; the last is the end, if the journal was closed.

The schema's history is in `docs/reference/audit.md`.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Union, cast, get_type_hints

import msgspec

from refitfsm.audit.broken import Broken
from refitfsm.audit.plain import build, tagged_wire, wire_of
from refitfsm.model.fleet import Cycle, Goal
from refitfsm.model.records import InputKind, Turn
from refitfsm.model.rules import Rules
from refitfsm.model.table import Verdict
from refitfsm.model.values import Event, Facts, ServerView

SCHEMA = 3
GENESIS = b"0" * 64
"""What stands for the hash before the first line."""

_HEAD, _MIDDLE = b'{"hash":"', b'","body":'
_BODY_AT = len(_HEAD) + len(GENESIS) + len(_MIDDLE)


def chain(previous: bytes, body: bytes) -> bytes:
    """The hash of a line, in hexadecimal."""
    return hashlib.sha256(previous + body).hexdigest().encode()


def line_of(hashed: bytes, body: bytes) -> bytes:
    """A line, without its end."""
    return b"%s%s%s%s}" % (_HEAD, hashed, _MIDDLE, body)


def body_of(line: bytes, previous: bytes) -> tuple[bytes, bytes]:
    """The hash and the body of a line that follows the one with the hash `previous`.

    Raises:
        Broken: it is no whole line, or does not follow.
    """
    end = -2 if line.endswith(b"}\n") else -1
    if not line.endswith((b"}\n", b"}")):
        raise Broken("the line is cut off")
    hashed, body = line[len(_HEAD) : _BODY_AT - len(_MIDDLE)], line[_BODY_AT:end]
    if not line.startswith(_HEAD) or line[_BODY_AT - len(_MIDDLE) : _BODY_AT] != _MIDDLE:
        raise Broken("is no line of a journal")
    if chain(previous, body) != hashed:
        raise Broken("the chain is broken: this line or one before it was changed")
    return hashed, body


class Header(NamedTuple):
    """The first body."""

    run: str
    started: str
    """A wall-clock time in ISO 8601."""
    servers: tuple[str, ...]
    rules: Rules


def read_header(body: bytes) -> Header:
    """The header.

    Raises:
        Broken: it is none, or of another schema. ValueError: it is no JSON, or ill-formed.
    """
    data = msgspec.json.decode(body)
    if not isinstance(data, dict) or data.pop("kind", None) != "header" or data.pop("n", None) != 0:
        raise Broken("the first line is no header")
    schema = data.pop("schema", None)
    if schema != SCHEMA:
        raise Broken(f"schema {schema} is not known here; this version reads schema {SCHEMA}")
    return build(Header, data)


class InputBody(NamedTuple):
    """What a step was given, unless it is a server's event: an `InputRecord`."""

    n: int
    at_s: float
    step: int
    given: InputKind
    goal: Goal | None = None
    version: int = 0
    chunk_bytes: tuple[int, ...] = ()
    reason: str = ""


class ServerBody(NamedTuple):
    """An event was judged on a server. The view before is the one after the server's last record."""

    n: int
    at_s: float
    step: int
    server: str
    event: msgspec.Raw
    """See `event_of`."""
    facts: msgspec.Raw
    """See `facts_of`."""
    verdict: Verdict
    row: str
    guards: msgspec.Raw
    """See `guards_of`."""
    rule: str = ""
    changed: dict[str, msgspec.Raw] | None = None
    """The fields of the server's view that are others now; see `changes_of`."""


class FleetBody(NamedTuple):
    """A cycle turned: a `FleetRecord`."""

    n: int
    at_s: float
    step: int
    turn: Turn
    cycle: Cycle | None
    serving_before: int
    serving_after: int
    reason: str = ""


class EndBody(NamedTuple):
    """The journal was closed: nothing follows."""

    n: int
    at_s: float


Body = InputBody | ServerBody | FleetBody | EndBody
"""Of every line but the first: its number, seconds since the fleet was made, and what happened."""

_WIRES = (
    tagged_wire(InputBody, "input"),
    tagged_wire(ServerBody, "server"),
    tagged_wire(FleetBody, "fleet"),
    tagged_wire(EndBody, "end"),
)
_DECODE = msgspec.json.Decoder(Union[tuple(wire.kind for wire in _WIRES)]).decode  # noqa: UP007
_MAKE = {wire.kind: wire.make for wire in _WIRES}


def read_body(body: bytes) -> Body:
    """The body of a line that is not the first.

    Raises:
        ValueError: it is none; the message names the field.
    """
    data = _DECODE(body)
    return cast("Body", _MAKE[type(data)](data))


_MANY = 1 << 14
"""Values that are kept, of each kind: servers of one fleet are told the same, and say the same."""
_GUARDS = msgspec.json.Decoder(tuple[tuple[str, bool], ...])


@lru_cache(_MANY)
def guards_of(raw: bytes) -> tuple[tuple[str, bool], ...]:
    """Each guard that was asked, in order, with its answer.

    Raises:
        ValueError: it is no such list.
    """
    return _GUARDS.decode(raw)


def _field_reader(hint: object) -> Callable[[bytes], object]:
    wire = wire_of(hint)
    decode, make = msgspec.json.Decoder(wire.kind).decode, wire.make
    return lru_cache(_MANY)(lambda raw: make(decode(raw)))


event_of = cast("Callable[[bytes], Event]", _field_reader(Event))
"""The event of a record; ValueError if it is none."""
facts_of = cast("Callable[[bytes], Facts]", _field_reader(Facts))
"""What was known of the fleet; ValueError if it is no such thing."""
_READERS = {name: _field_reader(hint) for name, hint in get_type_hints(ServerView).items()}


def changes_of(body: ServerBody) -> dict[str, object]:
    """What changed in the server's view, by field.

    Raises:
        ValueError: a value is not of its field's kind. KeyError: there is no such field.
    """
    return {name: _READERS[name](bytes(raw)) for name, raw in (body.changed or {}).items()}
