"""Decide a journal's steps again: would the planner that is installed now have decided the same.

`audit.verify` asks whether what was decided was allowed, and shares nothing with the planner. This asks
the planner itself, with what it was given then. So it says what an upgrade of refitfsm, or another policy,
would have changed in a run that took place.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import ne
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from refitfsm.audit.broken import Broken
from refitfsm.audit.journal import fields_of
from refitfsm.audit.lines import (
    GENESIS,
    EndBody,
    FleetBody,
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
from refitfsm.audit.plain import Plain
from refitfsm.errors import AuditError
from refitfsm.model.fleet import FleetView
from refitfsm.model.records import FleetRecord, InputRecord, Record, ServerRecord
from refitfsm.model.rules import Rules
from refitfsm.planner.cycle import Decide, Input, ServerEvent, Tick, decide, next_deadline_s
from refitfsm.planner.inputs import input_of

Fields = dict[str, Plain]


class Change(NamedTuple):
    """One field that is another now."""

    field: str
    """Its path: `event.command.kind`."""
    recorded: Plain
    decided: Plain


class Difference(NamedTuple):
    """The first record that is decided otherwise now."""

    line: int
    """Of the file, from 1; where the record stands, or would stand."""
    step: int
    at_s: float
    recorded: Fields | None
    """None: nothing more was decided in this step."""
    decided: Fields | None
    """None: nothing more is decided in this step."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """Field by field; empty where one of the two is not there."""
        if self.recorded is None or self.decided is None:
            return ()
        return tuple(_changes(self.recorded, self.decided))


class Replayed(NamedTuple):
    """How far a journal is decided the same."""

    run: str
    policy: str
    """The one that it is decided under now."""
    records: int
    """Decided again, and the same."""
    steps: int
    difference: Difference | None


def replay_file(path: str | Path, rules: Rules | None = None, *, planner: Decide = decide) -> Replayed:
    """Decide a journal file again, up to the first record that is another one.

    Args:
        path: of the file.
        rules: the policy to decide under; None: the one of the journal. Under another one deadlines are not
            compared, and a time that would have been up earlier is a difference.
        planner: what decides.

    Raises:
        AuditError: the file cannot be read, or is no whole journal; the message names the line.
    """
    try:
        with Path(path).open("rb") as file:
            return replay(file, str(path), rules, planner=planner)
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error


def replay(
    lines: Iterable[bytes], name: str = "journal", rules: Rules | None = None, *, planner: Decide = decide
) -> Replayed:
    """Decide a journal's lines again; see `replay_file`.

    Raises:
        AuditError: they are no whole journal; the message names the line.
    """
    number, previous = 0, GENESIS
    again: _Replay | None = None
    try:
        for number, line in enumerate(lines, 1):
            previous, data = body_of(line, previous)
            if again is None:
                head = read_header(data)
                again = _Replay(FleetView.of(head.servers), head.rules, rules, planner)
                run = head.run
            elif not again.take(_Line(number, data)):
                break
        if again is None:
            raise AuditError(f"{name}: is empty: a journal has at least a header")
        again.finish()
    except (Broken, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise AuditError(f"{name}: line {number}: {error}") from None
    return Replayed(run, again.rules.name, again.same, again.steps, again.difference)


class _Line:
    """A line of a step, read."""

    __slots__ = ("body", "data", "number")

    def __init__(self, number: int, data: bytes) -> None:
        self.number = number
        self.data = data
        self.body = read_body(data)

    def fields(self) -> Fields:
        """As `fields_of` the record."""
        data = msgspec.json.decode(self.data)
        return {key: value for key, value in data.items() if key not in ("n", "at_s", "kind", "step")}


class _Replay:
    """A fleet, decided step by step."""

    def __init__(self, fleet: FleetView, recorded: Rules, rules: Rules | None, planner: Decide) -> None:
        self.rules = rules or recorded
        self.same = 0
        self.steps = 0
        self.difference: Difference | None = None
        self._fleet = fleet
        self._other = self.rules != recorded
        self._decide = planner
        self._step: list[_Line] = []
        self._closed = False

    def take(self, line: _Line) -> bool:
        """A line; False when a difference is found."""
        if isinstance(line.body, EndBody):
            self._closed = True
            self._play()
        else:
            if self._step and line.body.step != _step_of(self._step[0]):
                self._closed = True  # a step is followed by another: all of it is there
                self._play()
            self._closed = False
            self._step.append(line)
        return self.difference is None

    def finish(self) -> None:
        """The lines have ended; the last step may be cut off."""
        if self.difference is None:
            self._play()

    def _play(self) -> None:
        """Decide the step that was read."""
        step, self._step = self._step, []
        if not step:
            return
        first = step[0]
        at_s = first.body.at_s
        given, recorded = _given(step)
        if self._other and not isinstance(given, Tick) and self._was_up(first, at_s):
            return
        decision = self._decide(self._fleet, given, at_s, self.rules)
        self._fleet = decision.fleet
        self.steps += 1
        for line, record in zip(recorded, decision.records, strict=False):
            if not self._is_same(line, record):
                self._differs(line.number, first, line.fields(), fields_of(record))
                return
            self.same += 1
        count = len(decision.records)
        if len(recorded) > count:
            self._differs(recorded[count].number, first, recorded[count].fields(), None)
        elif len(recorded) < count and self._closed:
            missing = fields_of(decision.records[len(recorded)])
            self._differs(step[-1].number + 1, first, None, missing)

    def _was_up(self, first: _Line, at_s: float) -> bool:
        """Under another policy a time may have been up before this step."""
        due_s = next_deadline_s(self._fleet)
        if due_s is None or due_s >= at_s:
            return False
        decision = self._decide(self._fleet, Tick(), due_s, self.rules)
        if decision.records:
            self.difference = Difference(
                first.number, _step_of(first), due_s, None, fields_of(decision.records[0])
            )
        return bool(decision.records)

    def _is_same(self, line: _Line, record: Record) -> bool:
        if not self._other:
            return _is_same(line.body, record)
        return not tuple(_changes(_without_times(line.fields()), _without_times(fields_of(record))))

    def _differs(self, number: int, first: _Line, recorded: Fields | None, decided: Fields | None) -> None:
        if self._other:
            recorded = _without_times(recorded) if recorded else None
            decided = _without_times(decided) if decided else None
        self.difference = Difference(number, _step_of(first), first.body.at_s, recorded, decided)


def _step_of(line: _Line) -> int:
    assert not isinstance(line.body, EndBody)  # noqa: S101 - for the type checker: an end is in no step
    return line.body.step


def _given(step: Sequence[_Line]) -> tuple[Input, Sequence[_Line]]:
    """What a step was given, and the lines that say what was decided."""
    first = step[0].body
    if isinstance(first, InputBody):
        return input_of(InputRecord(*first[3:])), step[1:]
    if isinstance(first, ServerBody):
        return ServerEvent(first.server, event_of(bytes(first.event))), step
    raise Broken("the step has no input")


def _is_same(body: object, record: Record) -> bool:
    if isinstance(body, FleetBody):
        return FleetRecord(*body[3:]) == record
    if not isinstance(body, ServerBody) or not isinstance(record, ServerRecord):
        return False
    after, changes = record.after, changes_of(body)
    return (
        (body.server, body.verdict, body.row, body.rule)
        == (after.server, record.verdict, record.row, record.rule)
        and event_of(bytes(body.event)) == record.event
        and facts_of(bytes(body.facts)) == record.facts
        and guards_of(bytes(body.guards)) == record.guards
        and all(getattr(after, name) == value for name, value in changes.items())
        and len(changes) == sum(map(ne, record.before, after))
    )


_TIMES = ("deadline_s", "closes_s")


def _without_times(value: Fields) -> Fields:
    """Without what a policy's deadlines change in every record."""
    return {
        key: _without_times(item) if isinstance(item, dict) else item
        for key, item in value.items()
        if key not in _TIMES
    }


_ABSENT = object()


def _changes(recorded: Fields, decided: Fields, at: str = "") -> Iterator[Change]:
    for key in (*recorded, *(key for key in decided if key not in recorded)):
        old, new = recorded.get(key, _ABSENT), decided.get(key, _ABSENT)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f"{at}{key}.")
        else:
            yield Change(f"{at}{key}", _shown(old), _shown(new))


def _shown(value: object) -> Plain:
    return None if value is _ABSENT else cast("Plain", value)
