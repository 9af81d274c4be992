"""The journal: one line for every record, written before anything is done about it."""

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from refitfsm.audit.lines import GENESIS, SCHEMA, chain, line_of
from refitfsm.audit.plain import Plain, plain
from refitfsm.errors import AuditError
from refitfsm.model.records import FleetRecord, InputRecord, ServerRecord, Turn, Written
from refitfsm.model.rules import Rules
from refitfsm.model.values import ServerView


class Journal(Protocol):
    """Where records go before they are acted on."""

    def append(self, records: Sequence[Written], at_s: float) -> None:
        """Store the records of one step, in order.

        `at_s` is seconds since the controller was started, the time that the planner was told.

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

    def append(self, records: Sequence[Written], at_s: float) -> None: ...

    def close(self) -> None: ...

    def set_aside(self) -> None: ...


class _Chain:
    """Bodies to lines, each with its hash and its number."""

    def __init__(self) -> None:
        self._hash = GENESIS
        self._encode = msgspec.json.Encoder().encode
        self.next = 0
        self._step = 0
        self._at_s = 0.0

    def head(self, head: dict[str, Plain]) -> bytes:
        return self._line(head)

    def records(self, records: Sequence[Written], at_s: float) -> list[bytes]:
        """The lines of one step."""
        self._at_s = at_s
        self._step += bool(records)
        step: dict[str, Plain] = {"step": self._step}
        return [self._line(self._frame(_KINDS[type(item)]) | step | fields_of(item)) for item in records]

    def end(self) -> bytes:
        """The last line: it says that the journal was closed, and so that none is missing after it."""
        return self._line(self._frame("end"))

    def _frame(self, kind: str) -> dict[str, Plain]:
        return {"n": self.next, "at_s": self._at_s, "kind": kind}

    def _line(self, body: dict[str, Plain]) -> bytes:
        data = self._encode(body)
        self._hash = chain(self._hash, data)
        self.next += 1
        return line_of(self._hash, data)


_KINDS = {InputRecord: "input", ServerRecord: "server", FleetRecord: "fleet"}


def fields_of(record: Written) -> dict[str, Plain]:
    """A record as its line has it, without number, time, step and kind."""
    if not isinstance(record, ServerRecord):
        data = plain(record)
        assert isinstance(data, dict)  # noqa: S101 - for the type checker: a NamedTuple is an object
        return data
    fields: dict[str, Plain] = {
        "server": record.server,
        "event": plain(record.event),
        "facts": plain(record.facts),
        "verdict": record.verdict.value,
        "row": record.row,
        "guards": [list(asked) for asked in record.guards],
    }
    if record.rule:
        fields["rule"] = record.rule
    changed = _changes(record.before, record.after)
    if changed:
        fields["changed"] = changed
    return fields


def _changes(before: ServerView, after: ServerView) -> dict[str, Plain]:
    return {
        name: plain(new)
        for name, old, new in zip(ServerView._fields, before, after, strict=True)
        if new is not old and new != old
    }


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
        self._chain = _Chain()
        self._bytes = 0
        try:
            self._file: io.FileIO | None = io.FileIO(self.path, "x")
        except FileExistsError:
            raise AuditError(
                f"{path}: exists already; a journal is never overwritten, give a new name"
            ) from None
        except OSError as error:
            raise AuditError(f"{path}: cannot be created: {error.strerror}") from error
        self._write([self._chain.head(head)], sync=True)

    def append(self, records: Sequence[Written], at_s: float) -> None:
        if self._file is None:
            raise AuditError(f"{self.path}: the journal is closed")
        commits = any(isinstance(item, FleetRecord) and item.turn is Turn.COMMITTED for item in records)
        if records:
            self._write(self._chain.records(records, at_s), sync=commits or self._sync_always)

    def _write(self, lines: list[bytes], *, sync: bool) -> None:
        assert self._file is not None  # noqa: S101 - for the type checker; callers have looked
        data = b"".join(line + b"\n" for line in lines)
        try:
            written = self._file.write(data)
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._let_go()
            raise AuditError(f"{self.path}: cannot be written: {error.strerror}") from error
        if written != len(data):
            os.ftruncate(self._file.fileno(), self._bytes)  # half a line would look like a forgery
            self._let_go()
            raise AuditError(f"{self.path}: cannot be written: the disk took only a part")
        self._bytes += written

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(AuditError):  # a journal without an end is told from one with it
                self._write([self._chain.end()], sync=True)
            self._let_go()

    def _let_go(self) -> None:
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
        self._chain = _Chain()
        self._closed = False
        self.lines: list[bytes] = [self._chain.head(head)]

    def append(self, records: Sequence[Written], at_s: float) -> None:
        if self._closed:
            raise AuditError("the journal is closed")
        self.lines += self._chain.records(records, at_s)

    def close(self) -> None:
        if not self._closed:
            self.lines.append(self._chain.end())
        self._closed = True

    def set_aside(self) -> None: ...
