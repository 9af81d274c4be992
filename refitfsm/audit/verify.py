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

from refitfsm.audit.journal import GENESIS, SCHEMA, chain
from refitfsm.audit.plain import build
from refitfsm.errors import AuditError
from refitfsm.model.effects import EFFECTS
from refitfsm.model.fleet import Cycle, Goal, Phase
from refitfsm.model.guards import GUARDS
from refitfsm.model.laws import broken
from refitfsm.model.records import FleetRecord, ServerRecord, Turn
from refitfsm.model.rules import Rules
from refitfsm.model.states import Gate, ServerState
from refitfsm.model.table import TABLE, Row, Verdict
from refitfsm.model.values import REQUESTS, Event, Facts, ServerView


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


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    hash: str
    body: msgspec.Raw


class _Broken(Exception):
    """The journal does not hold; the message says why."""


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
        except (_Broken, ValueError, KeyError, TypeError) as error:
            raise AuditError(f"{name}: line {number + 1}: {error}") from None
    if auditor is None:
        raise AuditError(f"{name}: is empty: a journal has at least a header")
    return auditor.result(number + 1)


def _decode_line(line: bytes, previous: str) -> _Line:
    if not line.endswith(b"\n") and not line.endswith(b"}"):
        raise _Broken("the line is cut off")
    try:
        item = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise _Broken(f"is no line of a journal: {error}") from None
    if chain(previous, bytes(item.body)) != item.hash:
        raise _Broken("the chain is broken: this line or one before it was changed")
    return item


class _Header(NamedTuple):
    run: str
    rules: Rules
    servers: tuple[str, ...]


def _decode_header(body: object) -> _Header:
    if not isinstance(body, dict) or body.get("kind") != "header":
        raise _Broken("the first line is no header")
    if body.get("schema") != SCHEMA:
        raise _Broken(f"schema {body.get('schema')} is not known here; this version reads schema {SCHEMA}")
    return _Header(str(body["run"]), build(Rules, body["rules"]), build(tuple[str, ...], body["servers"]))


class _Auditor:
    """Folds the records and judges each."""

    def __init__(self, head: _Header) -> None:
        self.head = head
        self.views = {name: ServerView(name) for name in head.servers}
        self.serving = 0
        self.cycle: Cycle | None = None
        self.last_cycle = 0
        self.at_s = 0.0
        self.turns = dict.fromkeys(Turn, 0)
        self.refused = 0
        self.reached = 0

    def result(self, records: int) -> Verified:
        closed = self.turns[Turn.CLOSED]
        return Verified(
            self.head.run,
            records,
            len(self.views),
            closed,
            self.turns[Turn.COMMITTED],
            closed - self.reached,
            self.refused + self.turns[Turn.REFUSED],
            self.serving,
            self.at_s,
        )

    def take(self, number: int, body: object) -> None:
        if not isinstance(body, dict):
            raise _Broken("is no record")
        if body.pop("n") != number:
            raise _Broken("the numbers have a gap: a line is missing, repeated or moved")
        at_s = build(float, body.pop("at_s"))
        if at_s < self.at_s:
            raise _Broken("time runs backwards")
        self.at_s = at_s
        kind = body.pop("kind")
        if kind == "server":
            self._server(build(ServerRecord, body))
        elif kind == "fleet":
            self._fleet(build(FleetRecord, body))
        else:
            raise _Broken(f"records of kind {kind} are not known here")

    # -- one server ----------------------------------------------------------------------------------

    def _server(self, record: ServerRecord) -> None:
        known = self.views.get(record.server)
        if known is None:
            raise _Broken(f"{record.server} is not a server of this run")
        if record.before != known:
            raise _Broken(f"{record.server}: the state before is not the state after its last record")
        facts = Facts(self.serving, self.cycle.id if self.cycle else 0)
        if record.facts != facts:
            raise _Broken(f"{record.server}: the fleet's facts were {facts}, not {record.facts}")
        self._judge(record)
        self._check_issue(record)
        law = broken((record.after,), self.serving)
        if law:
            raise _Broken(f"{record.server}: {law}")
        self.views[record.server] = record.after
        self.refused += record.verdict is Verdict.REFUSE

    def _judge(self, record: ServerRecord) -> None:
        arguments = (record.before, record.event, record.facts)
        for name, said in record.guards:
            if GUARDS[name].holds(*arguments) is not said:
                raise _Broken(f"{record.server}: the guard {name} is {not said} here, not {said}")
        row = _row_taken(*arguments)
        verdict = row.verdict if row else Verdict.REFUSE
        if verdict is not record.verdict or (row is not None and row.id != record.row):
            raise _Broken(
                f"{record.server}: the table says {verdict} ({row.id if row else 'no row'}) to"
                f" {record.event.name} here, not {record.verdict} ({record.row})"
            )
        after = record.before
        if row is not None and verdict is Verdict.TAKE:
            for effect in row.effects:
                after = EFFECTS[effect](after, record.event, record.facts)
            after = after._replace(state=row.destination or record.before.state)
        if after != record.after:
            raise _Broken(f"{record.server}: {record.event.name} does not lead to the state written down")

    def _check_issue(self, record: ServerRecord) -> None:
        """A command goes only to a member of the open cycle, under that cycle's number."""
        if record.event.name not in REQUESTS or record.verdict is not Verdict.TAKE:
            return
        cycle = self.cycle
        if cycle is None or record.server not in cycle.members or record.event.cycle != cycle.id:
            raise _Broken(f"{record.server}: {record.event.name} was issued outside the open cycle")
        out = cycle.given_up if cycle.phase is Phase.ABORTING else cycle.failed_servers
        if record.server in out:
            raise _Broken(f"{record.server}: {record.event.name} was issued after it dropped out")

    # -- the fleet -----------------------------------------------------------------------------------

    def _fleet(self, record: FleetRecord) -> None:
        if record.serving_before != self.serving:
            raise _Broken(f"version {self.serving} was served, not {record.serving_before}")
        if record.turn is not Turn.COMMITTED and record.serving_after != self.serving:
            raise _Broken(f"the version that is served moves at a commit, not at {record.turn}")
        getattr(self, f"_{record.turn.value}")(record)
        self.turns[record.turn] += 1
        self.serving = record.serving_after

    def _refused(self, record: FleetRecord) -> None:
        self._same_cycle(record)

    def _absorbed(self, record: FleetRecord) -> None:
        self._same_cycle(record)

    def _opened(self, record: FleetRecord) -> None:
        cycle = record.cycle
        if self.cycle is not None:
            raise _Broken(f"cycle {self.cycle.id} is open: one cycle at a time")
        if cycle is None or cycle.id != self.last_cycle + 1 or cycle.phase is not Phase.WORKING:
            raise _Broken("a cycle opens under the next number")
        if not cycle.members <= self.views.keys() or cycle.failed:
            raise _Broken("a cycle opens with servers of this run, none of them failed")
        if cycle.goal is Goal.REFIT and cycle.version <= self.serving:
            raise _Broken(f"version {cycle.version} is not above version {self.serving}")
        self.cycle, self.last_cycle = cycle, cycle.id

    def _dropped(self, record: FleetRecord) -> None:
        self._advance(record, Phase.WORKING, Phase.COMMITTED, Phase.ABORTING)

    def _aborting(self, record: FleetRecord) -> None:
        if self._open_cycle(record).phase is not Phase.WORKING:
            raise _Broken("a cycle aborts only while it works toward its goal")
        self._advance(record, Phase.ABORTING)

    def _committed(self, record: FleetRecord) -> None:
        cycle = self._open_cycle(record)
        if cycle.phase is not Phase.WORKING:
            raise _Broken("a cycle commits once")
        self._advance(record, Phase.COMMITTED)
        if record.serving_after != cycle.version:
            raise _Broken(f"cycle {cycle.id} commits version {cycle.version}, not {record.serving_after}")
        for name in cycle.members - cycle.failed_servers:
            if not _is_ready(self.views[name], cycle):
                raise _Broken(f"cycle {cycle.id} commits although {name} is not ready")

    def _closed(self, record: FleetRecord) -> None:
        cycle = self._open_cycle(record)
        waiting = [name for name in cycle.members if self.views[name].pending]
        if waiting:
            raise _Broken(f"cycle {cycle.id} closes with a command in flight to {waiting[0]}")
        done = Phase.WORKING if cycle.goal is Goal.RELEASE else Phase.COMMITTED
        if cycle.goal is Goal.RELEASE and cycle.phase is Phase.WORKING:
            for name in cycle.members - cycle.failed_servers:
                if self.head.rules.release_tags & self.views[name].resident:
                    raise _Broken(f"cycle {cycle.id} closes as released although {name} is not")
        elif cycle.phase is Phase.WORKING:
            raise _Broken(f"cycle {cycle.id} closes without a commit or an abort")
        self.reached += cycle.phase is done
        self._same_cycle(record)
        self.cycle = None

    def _open_cycle(self, record: FleetRecord) -> Cycle:
        if self.cycle is None or record.cycle is None or record.cycle.id != self.cycle.id:
            raise _Broken(f"{record.turn} is not about the open cycle")
        return self.cycle

    def _same_cycle(self, record: FleetRecord) -> None:
        if _without_count(record.cycle) != _without_count(self.cycle):
            raise _Broken(f"the cycle changed at {record.turn}")

    def _advance(self, record: FleetRecord, *phases: Phase) -> None:
        """The cycle may change its phase as the turn says, and lose servers; nothing else."""
        before, after = self._open_cycle(record), record.cycle
        if after is None or after.phase not in phases:
            raise _Broken(f"a cycle is {', '.join(phases)} after {record.turn}")
        kept = before._replace(
            phase=after.phase,
            failed=after.failed,
            given_up=after.given_up,
            reason=after.reason,
            closes_s=after.closes_s,
            busy=after.busy,
        )
        if kept != after or after.failed[: len(before.failed)] != before.failed:
            raise _Broken(f"more of the cycle changed than {record.turn} changes")
        self.cycle = after


def _without_count(cycle: Cycle | None) -> Cycle | None:
    return cycle._replace(busy=0) if cycle else None


def _row_taken(view: ServerView, event: Event, facts: Facts) -> Row | None:
    for row in TABLE[view.state, event.name]:
        if all(GUARDS[name].holds(view, event, facts) for name in row.guards):
            return row
    return None


def _is_ready(view: ServerView, cycle: Cycle) -> bool:
    """What a commit asks of a member, said once more and otherwise than the planner says it."""
    whole = view.content.proved and view.content.version == cycle.version and not view.released
    if view.pending is not None or view.session:
        return False
    if cycle.goal is Goal.ENROL:
        return view.state is not ServerState.OFFLINE
    if cycle.goal is Goal.REFIT:
        return whole and view.state is ServerState.KV_REBUILT and view.content.cycle == cycle.id
    if cycle.goal is Goal.RESUME:
        return whole and view.state in (ServerState.KV_REBUILT, ServerState.SERVING)
    return whole and view.paused and view.kv_epoch is None and view.gate is Gate.CLOSED
