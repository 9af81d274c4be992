"""The journal: one line of JSON for every record, written before anything is done about it.

A line is `{"hash": H, "body": B}` where H is the SHA-256 of the previous line's hash followed by the
bytes of B: a line that is edited, dropped, repeated or moved breaks the chain. The first body is the
header, with the schema's version, the run, and the policy.

The schema's history is in `docs/reference/audit.md`.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from refitfsm.audit.plain import Plain, plain
from refitfsm.errors import AuditError
from refitfsm.model.records import FleetRecord, Record, ServerRecord, Turn
from refitfsm.model.rules import Rules
from refitfsm.model.values import ServerView

SCHEMA = 1
GENESIS = "0" * 64
"""What stands for the hash before the first line."""


class Journal(Protocol):
    """Where records go before they are acted on."""

    def append(self, records: Sequence[Record], at_s: float) -> None:
        """Store records, in order.

        `at_s` is seconds since the controller was started.

        Raises:
            AuditError: they could not be stored; nothing may be issued any more.
        """
        ...

    def close(self) -> None:
        """Idempotent."""
        ...

    def set_aside(self) -> None:
        """Called on a closed journal whose fleet never came to be."""
        ...


class NoJournal:
    """Keeps nothing: for fleets whose owner wants no audit."""

    def append(self, records: Sequence[Record], at_s: float) -> None: ...

    def close(self) -> None: ...

    def set_aside(self) -> None: ...


def chain(previous: str, body: bytes) -> str:
    """The hash of a line."""
    return hashlib.sha256(previous.encode() + body).hexdigest()


class _Encoder:
    """Records as JSON bytes. A server's view is encoded once and used as the next record's `before`."""

    def __init__(self) -> None:
        self._json = msgspec.json.Encoder()
        self._views: dict[str, tuple[ServerView, msgspec.Raw]] = {}

    def view(self, view: ServerView) -> msgspec.Raw:
        known = self._views.get(view.server)
        if known is not None and known[0] is view:
            return known[1]
        raw = msgspec.Raw(self._json.encode(plain(view)))
        self._views[view.server] = (view, raw)
        return raw

    def body(self, number: int, at_s: float, record: Record) -> bytes:
        if isinstance(record, ServerRecord):
            return self._json.encode(
                {
                    "n": number,
                    "at_s": round(at_s, 6),
                    "kind": "server",
                    "server": record.server,
                    "event": plain(record.event),
                    "facts": plain(record.facts),
                    "verdict": record.verdict.value,
                    "row": record.row,
                    "guards": plain(record.guards),
                    "rule": record.rule,
                    "before": self.view(record.before),
                    "after": self.view(record.after),
                }
            )
        return self._json.encode({"n": number, "at_s": round(at_s, 6), "kind": "fleet"} | _fields(record))


def _fields(record: FleetRecord) -> dict[str, Plain]:
    data = plain(record)
    assert isinstance(data, dict)  # noqa: S101 - for the type checker: a NamedTuple is an object
    return data


def header(run_id: str, rules: Rules, servers: Sequence[str], started: str) -> dict[str, Plain]:
    """The first body of a journal. `started` is a wall-clock time in ISO 8601."""
    return {
        "n": 0,
        "kind": "header",
        "schema": SCHEMA,
        "run": run_id,
        "started": started,
        "servers": list(servers),
        "rules": plain(rules),
    }


class FileJournal:
    """A journal in a file. Handed to the kernel before each act, synced to disk at each commit.

    What is handed to the kernel survives the death of this process; what is synced survives the
    host's. A crash of the host takes colocated servers with it, so commits are enough by default.
    """

    def __init__(self, path: str | Path, head: dict[str, Plain], *, sync_always: bool = False) -> None:
        """Start a new journal.

        Raises:
            AuditError: the file exists or cannot be created.
        """
        self.path = Path(path)
        self._sync_always = sync_always
        self._encoder = _Encoder()
        self._hash = GENESIS
        self._next = 0
        self._bytes = 0
        try:
            self._file: io.FileIO | None = io.FileIO(self.path, "x")
        except FileExistsError:
            raise AuditError(
                f"{path}: exists already; a journal is never overwritten, give a new name"
            ) from None
        except OSError as error:
            raise AuditError(f"{path}: cannot be created: {error.strerror}") from error
        self._write([msgspec.json.encode(head)], sync=True)

    def append(self, records: Sequence[Record], at_s: float) -> None:
        bodies = [self._encoder.body(self._next + index, at_s, item) for index, item in enumerate(records)]
        commits = any(isinstance(item, FleetRecord) and item.turn is Turn.COMMITTED for item in records)
        if bodies:
            self._write(bodies, sync=commits or self._sync_always)

    def _write(self, bodies: list[bytes], *, sync: bool) -> None:
        if self._file is None:
            raise AuditError(f"{self.path}: the journal is closed")
        lines = []
        for body in bodies:
            self._hash = chain(self._hash, body)
            lines.append(b'{"hash":"%s","body":%s}\n' % (self._hash.encode(), body))
        data = b"".join(lines)
        try:
            written = self._file.write(data)
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self.close()
            raise AuditError(f"{self.path}: cannot be written: {error.strerror}") from error
        if written != len(data):
            os.ftruncate(self._file.fileno(), self._bytes)  # half a line would look like a forgery
            self.close()
            raise AuditError(f"{self.path}: cannot be written: the disk took only a part")
        self._bytes += written
        self._next += len(bodies)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def set_aside(self) -> None:
        """Make room for the next try: the file is kept as `NAME.failed`."""
        with contextlib.suppress(OSError):
            self.path.replace(self.path.with_name(self.path.name + ".failed"))


class MemoryJournal:
    """A journal in memory: the same lines, for tests and simulations."""

    def __init__(self, head: dict[str, Plain]) -> None:
        self._encoder = _Encoder()
        self._hash = GENESIS
        self.lines: list[bytes] = []
        self._add(msgspec.json.encode(head))

    def _add(self, body: bytes) -> None:
        self._hash = chain(self._hash, body)
        self.lines.append(b'{"hash":"%s","body":%s}' % (self._hash.encode(), body))

    def append(self, records: Sequence[Record], at_s: float) -> None:
        for record in records:
            self._add(self._encoder.body(len(self.lines), at_s, record))

    def close(self) -> None: ...

    def set_aside(self) -> None: ...
