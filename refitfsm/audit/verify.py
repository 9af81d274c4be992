"""Judge a journal again, record by record, with code that does not import the planner.

For every record: the chain is whole, the numbers have no gap, the state before is the state after the
server's last record, the guards written down are what the guards say of that state, the row is the one
that the table takes, the effects lead to the state after, and every law holds. For every turn of a
cycle: the version that the fleet serves moves at a commit and nowhere else, and a commit finds every
member that counts ready.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from refitfsm.audit.broken import Broken
from refitfsm.audit.journal import GENESIS, SCHEMA, chain
from refitfsm.audit.plain import build
from refitfsm.audit.turns import CycleAudit
from refitfsm.errors import AuditError
from refitfsm.model.effects import EFFECTS
from refitfsm.model.guards import GUARDS
from refitfsm.model.laws import broken
from refitfsm.model.records import FleetRecord, ServerRecord, Turn
from refitfsm.model.rules import Rules
from refitfsm.model.table import TABLE, Row, Verdict
from refitfsm.model.values import Event, Facts, ServerView


class Verified(NamedTuple):
    """What a journal that holds has in it."""

    run: str
    records: int
    servers: int
    cycles: int
    committed: int
    aborted: int
    refused: int
    serving_version: int
    last_at_s: float
    open_cycle: int
    """The cycle that the journal ends in; 0: none. The controller died in it, or still runs."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    hash: str
    body: msgspec.Raw


def verify_file(path: str | Path) -> Verified:
    """Judge a journal file.

    Raises:
        AuditError: the file cannot be read, or does not hold; the message names the line.
    """
    try:
        with Path(path).open("rb") as file:
            return verify(file, str(path))
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error


def verify(lines: Iterable[bytes], name: str = "journal") -> Verified:
    """Judge a journal's lines.

    Raises:
        AuditError: it does not hold; the message names the line.
    """
    auditor: _Auditor | None = None
    previous = GENESIS
    number = -1
    for number, line in enumerate(lines):
        try:
            item = _decode_line(line, previous)
            previous = item.hash
            body = msgspec.json.decode(item.body)
            if auditor is None:
                auditor = _Auditor(_decode_header(body))
            else:
                auditor.take(number, body)
        except (Broken, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise AuditError(f"{name}: line {number + 1}: {error}") from None
    if auditor is None:
        raise AuditError(f"{name}: is empty: a journal has at least a header")
    return auditor.result(number + 1)


def _decode_line(line: bytes, previous: str) -> _Line:
    if not line.endswith(b"\n") and not line.endswith(b"}"):
        raise Broken("the line is cut off")
    try:
        item = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise Broken(f"is no line of a journal: {error}") from None
    if chain(previous, bytes(item.body)) != item.hash:
        raise Broken("the chain is broken: this line or one before it was changed")
    return item


class _Header(NamedTuple):
    run: str
    rules: Rules
    servers: tuple[str, ...]


def _decode_header(body: object) -> _Header:
    if not isinstance(body, dict) or body.get("kind") != "header":
        raise Broken("the first line is no header")
    if body.get("schema") != SCHEMA:
        raise Broken(f"schema {body.get('schema')} is not known here; this version reads schema {SCHEMA}")
    return _Header(str(body["run"]), build(Rules, body["rules"]), build(tuple[str, ...], body["servers"]))


class _Auditor:
    """Folds the records and judges each."""

    def __init__(self, head: _Header) -> None:
        self.head = head
        self.views = {name: ServerView(name) for name in head.servers}
        self.cycles = CycleAudit(head.rules, self.views)
        self.at_s = 0.0
        self.refused = 0

    def result(self, records: int) -> Verified:
        cycles = self.cycles
        closed = cycles.turns[Turn.CLOSED]
        return Verified(
            self.head.run,
            records,
            len(self.views),
            closed,
            cycles.turns[Turn.COMMITTED],
            closed - cycles.reached,
            self.refused + cycles.turns[Turn.REFUSED],
            cycles.serving,
            self.at_s,
            cycles.cycle.id if cycles.cycle else 0,
        )

    def take(self, number: int, body: object) -> None:
        if not isinstance(body, dict):
            raise Broken("is no record")
        if build(int, body.pop("n")) != number:
            raise Broken("the numbers have a gap: a line is missing, repeated or moved")
        at_s = build(float, body.pop("at_s"))
        if at_s < self.at_s:
            raise Broken("time runs backwards")
        self.at_s = at_s
        kind = body.pop("kind")
        if kind == "server":
            self._server(build(ServerRecord, body))
        elif kind == "fleet":
            self.cycles.take(build(FleetRecord, body), at_s)
        else:
            raise Broken(f"records of kind {kind} are not known here")

    # -- one server ----------------------------------------------------------------------------------

    def _server(self, record: ServerRecord) -> None:
        known = self.views.get(record.server)
        if known is None:
            raise Broken(f"{record.server} is not a server of this run")
        if record.before != known:
            raise Broken(f"{record.server}: the state before is not the state after its last record")
        cycles = self.cycles
        facts = Facts(cycles.serving, cycles.cycle.id if cycles.cycle else 0, cycles.serving_push)
        if record.facts != facts:
            raise Broken(f"{record.server}: the fleet's facts were {facts}, not {record.facts}")
        self._judge(record)
        cycles.see(record, self.at_s)
        law = broken((record.after,), facts)
        if law:
            raise Broken(f"{record.server}: {law}")
        self.views[record.server] = record.after
        self.refused += record.verdict is Verdict.REFUSE

    def _judge(self, record: ServerRecord) -> None:
        asked = _ask(record.before, record.event, record.facts)
        for name, said in record.guards:
            if dict(asked.guards).get(name, said) is not said:
                raise Broken(f"{record.server}: the guard {name} is {not said} here, not {said}")
        if record.guards != asked.guards:
            raise Broken(f"{record.server}: other guards are asked here than are written down")
        row = asked.row
        verdict = row.verdict if row else Verdict.REFUSE
        if verdict is not record.verdict or (row is not None and row.id != record.row):
            raise Broken(
                f"{record.server}: the table says {verdict} ({row.id if row else 'no row'}) to"
                f" {record.event.name} here, not {record.verdict} ({record.row})"
            )
        if record.rule != asked.rule:
            raise Broken(f"{record.server}: the rule is {asked.rule!r} here, not {record.rule!r}")
        after = record.before
        if row is not None and verdict is Verdict.TAKE:
            for effect in row.effects:
                after = EFFECTS[effect](after, record.event, record.facts)
            after = after._replace(state=row.destination or record.before.state)
        if after != record.after:
            raise Broken(f"{record.server}: {record.event.name} does not lead to the state written down")


class _Asked(NamedTuple):
    """What the table says, with every guard that it took to say it."""

    row: Row | None
    guards: tuple[tuple[str, bool], ...]
    rule: str


def _ask(view: ServerView, event: Event, facts: Facts) -> _Asked:
    asked: dict[str, bool] = {}
    rule = ""
    for row in TABLE[view.state, event.name]:
        for name in row.guards:
            asked.setdefault(name, GUARDS[name].holds(view, event, facts))
            if not asked[name]:
                rule = rule or name
                break
        else:
            return _Asked(row, tuple(asked.items()), row.rule)
    return _Asked(None, tuple(asked.items()), rule)
