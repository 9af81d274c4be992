"""Judge a journal again, record by record, with code that does not import the planner.

For every record: the chain is whole, the numbers have no gap, the state before is the state after the
server's last record, the guards written down are what the guards say of that state, the row is the one
that the table takes, the effects lead to the state after, and every law holds. For every turn of a
cycle: the version that the fleet serves moves at a commit and nowhere else, and a commit finds every
member that counts ready. For every step: it has one input and one time, and its records answer to it.
"""

from collections.abc import Iterable
from operator import attrgetter, ne
from pathlib import Path
from typing import NamedTuple

from refitfsm.audit.broken import Broken
from refitfsm.audit.lines import (
    GENESIS,
    EndBody,
    FleetBody,
    Header,
    InputBody,
    ServerBody,
    body_of,
    changes_of,
    event_of,
    facts_of,
    guards_of,
    read_body,
    read_header,
)
from refitfsm.audit.steps import StepAudit
from refitfsm.audit.turns import CycleAudit
from refitfsm.errors import AuditError
from refitfsm.model.effects import EFFECTS, Effect
from refitfsm.model.guards import GUARDS, Predicate
from refitfsm.model.laws import broken
from refitfsm.model.records import FleetRecord, InputRecord, ServerRecord, Turn
from refitfsm.model.table import TABLE, Key, Row, Verdict
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
    ended: bool
    """The journal was closed. If not, its controller died, or still runs, or lines are missing at the end."""
    hash: str
    """Of the last line. Kept elsewhere, it tells whether the journal is still the same."""


def verify_file(path: str | Path, *, closed: bool = False, last_hash: str = "") -> Verified:
    """Judge a journal file.

    Args:
        path: of the file.
        closed: the journal has to have its end. Without it lines may be missing there.
        last_hash: what the last line's hash has to be, if it was kept elsewhere.

    Raises:
        AuditError: the file cannot be read, or does not hold; the message names the line.
    """
    try:
        with Path(path).open("rb") as file:
            found = verify(file, str(path))
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    if closed and not found.ended:
        raise AuditError(f"{path}: has no end: its controller died, or runs, or lines are missing there")
    if last_hash not in ("", found.hash):
        raise AuditError(
            f"{path}: the last hash is {found.hash}, not the one that was kept: it is another one"
        )
    return found


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
            previous, body = body_of(line, previous)
            if auditor is None:
                auditor = _Auditor(read_header(body))
            else:
                auditor.take(number, body)
        except (Broken, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise AuditError(f"{name}: line {number + 1}: {error}") from None
    if auditor is None:
        raise AuditError(f"{name}: is empty: a journal has at least a header")
    return auditor.result(number + 1, previous.decode())


READ_BY_LAWS = (
    "state",
    "resident",
    "released",
    "content",
    "kv_epoch",
    "gate",
    "paused",
    "session",
    "condition",
)
"""Fields of a view that laws read, beside the kind of the pending command and whether there is a backup."""
_read_by_laws = attrgetter(*READ_BY_LAWS)


class _Auditor:
    """Folds the records and judges each."""

    def __init__(self, head: Header) -> None:
        self.head = head
        self.views = {name: ServerView(name) for name in head.servers}
        self.steps = StepAudit(self.views)
        self.cycles = CycleAudit(head.rules, self.views)
        self.facts = Facts()
        self._lawful = set[tuple[object, ...]]()
        """What laws look at, of views that were found lawful: servers go through the same again and again."""
        self.at_s = 0.0
        self.refused = 0
        self.ended = False

    def result(self, records: int, last_hash: str) -> Verified:
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
            self.ended,
            last_hash,
        )

    def take(self, number: int, data: bytes) -> None:
        body = read_body(data)
        if body.n != number:
            raise Broken("the numbers have a gap: a line is missing, repeated or moved")
        if self.ended:
            raise Broken("the journal was closed before this line")
        if isinstance(body, EndBody):
            self.steps.end()
            self.cycles.end_step()
            self.ended = True
            if body.at_s != self.at_s:
                raise Broken("a journal is closed at the time of its last step")
            return
        event = event_of(bytes(body.event)) if isinstance(body, ServerBody) else None
        if self.steps.take(body, event.name if event else None):
            self.cycles.begin_step(InputRecord(*body[3:]) if isinstance(body, InputBody) else None)
        self.at_s = body.at_s
        if isinstance(body, ServerBody) and event is not None:
            self._server(body, event)
        elif isinstance(body, FleetBody):
            cycles = self.cycles
            cycles.take(FleetRecord(*body[3:]), body.at_s)
            self.facts = Facts(cycles.serving, cycles.cycle.id if cycles.cycle else 0, cycles.serving_push)

    def _server(self, body: ServerBody, event: Event) -> None:
        """An event on one server."""
        name, facts = body.server, self.facts
        before = self.views.get(name)
        if before is None:
            raise Broken(f"{name} is not a server of this run")
        written = facts_of(bytes(body.facts))
        if written != facts:
            raise Broken(f"{name}: the fleet's facts were {facts}, not {written}")
        asked = _ask(before, event, facts)
        _check_judgement(body, event, asked)
        after = _follow(before, event, facts, asked)
        _check_changes(body, before, after)
        record = ServerRecord(
            name, event, facts, body.verdict, body.row, asked.guards, asked.rule, before, after
        )
        self.cycles.see(record, body.at_s)
        self._check_laws(after)
        self.views[name] = after
        self.refused += body.verdict is Verdict.REFUSE

    def _check_laws(self, view: ServerView) -> None:
        """Every law. Views that differ in nothing that a law reads are judged once."""
        kind = view.pending.command.kind if view.pending else None
        read = _read_by_laws(view)
        what = (read, kind, view.capabilities.weights_backup, self.facts)
        if what in self._lawful:
            return
        law = broken((view,), self.facts)
        if law:
            raise Broken(f"{view.server}: {law}")
        self._lawful.add(what)


class _Rule(NamedTuple):
    """A row of the table, with what its names stand for."""

    row: Row
    guards: tuple[tuple[str, Predicate], ...]
    effects: tuple[Effect, ...]


def _rule(row: Row) -> _Rule:
    guards = tuple((name, GUARDS[name].holds) for name in row.guards)
    taken = row.effects if row.verdict is Verdict.TAKE else ()
    return _Rule(row, guards, tuple(EFFECTS[name] for name in taken))


_CELLS: dict[Key, tuple[_Rule, ...]] = {key: tuple(map(_rule, cell)) for key, cell in TABLE.items()}


class _Asked(NamedTuple):
    """What the table says, with every guard that it took to say it."""

    found: _Rule | None
    guards: tuple[tuple[str, bool], ...]
    rule: str


_AT_ONCE = {
    cell[0].row.id: _Asked(cell[0], tuple((name, True) for name, _ in cell[0].guards), cell[0].row.rule)
    for cell in _CELLS.values()
}
"""By its id, for a row that is the first of its cell: all of its guards hold."""


def _ask(view: ServerView, event: Event, facts: Facts) -> _Asked:
    cell = _CELLS[view.state, event.name]
    first = cell[0]
    for _, holds in first.guards:
        if not holds(view, event, facts):
            break
    else:
        return _AT_ONCE[first.row.id]
    asked: dict[str, bool] = {}
    failed = ""
    for found in cell:
        for name, holds in found.guards:
            if name not in asked:
                asked[name] = holds(view, event, facts)
            if not asked[name]:
                failed = failed or name
                break
        else:
            return _Asked(found, tuple(asked.items()), found.row.rule)
    return _Asked(None, tuple(asked.items()), failed)


def _follow(view: ServerView, event: Event, facts: Facts, asked: _Asked) -> ServerView:
    """The view after the event."""
    if asked.found is None or asked.found.row.verdict is not Verdict.TAKE:
        return view
    for effect in asked.found.effects:
        view = effect(view, event, facts)
    to = asked.found.row.destination
    return view if to is None or to is view.state else view._replace(state=to)


def _check_judgement(body: ServerBody, event: Event, asked: _Asked) -> None:
    """The guards, the verdict, the row and the rule are those of the table."""
    server, written = body.server, guards_of(bytes(body.guards))
    if written != asked.guards:
        answers = dict(asked.guards)
        for name, said in written:
            if answers.get(name, said) is not said:
                raise Broken(f"{server}: the guard {name} is {not said} here, not {said}")
        raise Broken(f"{server}: other guards are asked here than are written down")
    row = asked.found.row if asked.found else None
    verdict = row.verdict if row else Verdict.REFUSE
    if verdict is not body.verdict or (row is not None and row.id != body.row):
        raise Broken(
            f"{server}: the table says {verdict} ({row.id if row else 'no row'}) to"
            f" {event.name} here, not {body.verdict} ({body.row})"
        )
    if body.rule != asked.rule:
        raise Broken(f"{server}: the rule is {asked.rule!r} here, not {body.rule!r}")


def _check_changes(body: ServerBody, before: ServerView, after: ServerView) -> None:
    """What is written to have changed is what the effects change, and all of it."""
    changes = changes_of(body)
    for name, value in changes.items():
        if getattr(after, name) != value:
            raise Broken(f"{body.server}: {body.row} does not lead to {name} {value!r}")
    if len(changes) != sum(map(ne, before, after)):
        raise Broken(f"{body.server}: {body.row} changes other fields than are written down")
