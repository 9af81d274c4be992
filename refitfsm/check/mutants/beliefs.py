"""One step from any belief: what the table makes of each event, wherever a server could be believed to be.

A planner's game reaches few beliefs, so that there most guards are implied by others. The table does not lean
on that: what it takes has to be lawful from beliefs that no way leads to as well. Requests are judged from
every belief here; answers from those in which a request of their kind can be in flight.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import NamedTuple

from refitfsm.check import steps
from refitfsm.check.mutants.graph import Found, Unsound
from refitfsm.check.mutants.rules import Mutant
from refitfsm.model import laws
from refitfsm.model.commands import COMMANDS, LostMeans
from refitfsm.model.row import Verdict
from refitfsm.model.states import ALL_TAGS, Condition, ContentKind, Gate, ServerState, Tag
from refitfsm.model.table import BOOK, Book, Cell, Key
from refitfsm.model.values import (
    NOTHING_REPORTED,
    REQUESTS,
    Capabilities,
    Command,
    CommandKind,
    Content,
    Event,
    EventName,
    Facts,
    Pending,
    Report,
    ServerView,
)
from refitfsm.planner.judge import apply, judge

NAME = "s0"
FACTS = Facts(serving_version=3, cycle=5, serving_push=4)
_GENERAL = (EventName.REFUSED, EventName.FAILED, EventName.LOST)
HARMLESS = tuple(kind for kind, spec in COMMANDS.items() if spec.lost_means is LostMeans.REPEAT)
_WHY = "why"
_CHUNKS = 2


class Case(NamedTuple):
    """Something happens to a server of which this is believed."""

    view: ServerView
    event: Event


class Outcome(NamedTuple):
    """What the table makes of it."""

    verdict: Verdict
    view: ServerView
    law: str
    """The law that is broken; empty if none."""


# -- what can be believed ------------------------------------------------------------------------------

_PARTIAL, _COMPLETE = ContentKind.PARTIAL, ContentKind.COMPLETE
_CONTENTS = (
    Content(),
    Content(_PARTIAL, cycle=5),
    Content(_PARTIAL, 4, 5, 1, _CHUNKS),
    Content(_PARTIAL, 4, 2, 1, _CHUNKS),
    Content(_COMPLETE, 3, 4, _CHUNKS, _CHUNKS, proved=True),
    Content(_COMPLETE, 3, 4, _CHUNKS, _CHUNKS),
    Content(_COMPLETE, 4, 5, _CHUNKS, _CHUNKS, proved=True),
    Content(_COMPLETE, 4, 5, _CHUNKS, _CHUNKS),
)
_REST = ALL_TAGS - {Tag.WEIGHTS}
_TAGS = (frozenset[Tag](), frozenset({Tag.WEIGHTS}), frozenset({Tag.KV_CACHE}), _REST)
_MEMORY: tuple[tuple[frozenset[Tag], frozenset[Tag]], ...] = (
    (ALL_TAGS, frozenset()),
    (frozenset({Tag.WEIGHTS}), _REST),
    (_REST, frozenset({Tag.WEIGHTS})),
    (frozenset(), ALL_TAGS),
    (frozenset({Tag.WEIGHTS}), frozenset()),
)
"""Resident and released; what is in neither is not known."""
_SESSIONS = (0, FACTS.cycle, -1)
_ABLE = Capabilities(sessions=True, memory_saver=True)
_SERVES: Mapping[str, object] = {"paused": False, "kv_epoch": FACTS.serving_version, "gate": Gate.OPEN}
_ELSE: tuple[Mapping[str, object], ...] = (
    {},
    {"kv_epoch": FACTS.serving_version},
    {"kv_epoch": FACTS.serving_version - 1},
    {"gate": Gate.DRAINING},
    {"paused": False},
    {"paused": False, "kv_epoch": FACTS.serving_version},
    _SERVES,
    {**_SERVES, "condition": Condition.SUSPECT},
    *({"condition": each} for each in Condition if each is not Condition.HEALTHY),
    {"capabilities": _ABLE._replace(sessions=False)},
    {"capabilities": _ABLE._replace(memory_saver=False)},
    {"capabilities": _ABLE._replace(weights_backup=True)},
)
"""Otherwise than of a server that is quiet, healthy and able."""


@cache
def beliefs(state: ServerState) -> tuple[ServerView, ...]:
    """What can be believed of a server in a state, with nothing in flight."""
    if state is ServerState.OFFLINE:
        return (ServerView(NAME), ServerView(NAME, seq=7, capabilities=_ABLE, reason=_WHY))
    return tuple(
        ServerView(
            NAME, state, resident, released, content, paused=True, session=session, seq=7, capabilities=_ABLE
        )._replace(**other)  # type: ignore[arg-type]
        for content, (resident, released), session, other in product(_CONTENTS, _MEMORY, _SESSIONS, _ELSE)
    )


def _odd(view: ServerView) -> bool:
    """Whether a server is not quiet, healthy and able, as most are of which something is asked."""
    usual = ServerView("", paused=view.state is not ServerState.OFFLINE, capabilities=view.capabilities)
    rest = (view.kv_epoch, view.gate, view.paused, view.condition)
    return rest != (usual.kv_epoch, usual.gate, usual.paused, usual.condition)


# -- what can happen -----------------------------------------------------------------------------------


@cache
def commands(kind: CommandKind) -> tuple[Command, ...]:
    """Every command of a kind that is worth telling apart."""
    if kind in (CommandKind.RELEASE, CommandKind.RESUME):
        return tuple(Command(kind, tags=tags) for tags in (*_TAGS, ALL_TAGS))
    versions = (FACTS.serving_version, FACTS.serving_version + 1)
    if kind is CommandKind.PUSH:
        parts = (*((chunk, _CHUNKS) for chunk in range(_CHUNKS + 1)), (0, 1))
        return tuple(Command(kind, version=v, chunk=c, chunks=n) for v in versions for c, n in parts)
    if kind in (CommandKind.VERIFY, CommandKind.CONTINUE):
        return tuple(Command(kind, version=version) for version in versions)
    return (Command(kind),)


def _requests(state: ServerState, name: EventName) -> Iterator[Case]:
    busy = Pending(Command(CommandKind.FLUSH), FACTS.cycle, 7, 1.0)
    for command in commands(CommandKind(name.value)):
        event = Event(name, command, FACTS.cycle, deadline_s=1.0)
        for view in beliefs(state):
            yield Case(view, event)
            if view.gate is Gate.OPEN or not _odd(view):
                yield Case(view._replace(pending=busy), event)


@cache
def _in_flight(state: ServerState, kind: CommandKind) -> tuple[ServerView, ...]:
    """What is believed when a command of a kind was sent, lawfully."""
    found: dict[ServerView, None] = {}
    for case in _requests(state, EventName(kind.value)):
        made = outcome(case, BOOK)
        if made.verdict is Verdict.TAKE:
            found[made.view] = None
    return tuple(found)


def reports(name: EventName, command: Command) -> Iterator[Report]:
    yield NOTHING_REPORTED
    if name is EventName.ENROLLED:
        yield Report(capabilities=_ABLE)
        yield Report(capabilities=_ABLE, paused=True)
    elif name is EventName.VERIFIED:
        yield Report(version=command.version, checksum="sum")
    elif name is EventName.REFUSED:
        yield Report(session_open=True)
        yield Report(session_closed=True)


def _awaited(state: ServerState, name: EventName) -> Iterator[tuple[ServerView, Pending]]:
    """Beliefs in which an answer may come; a bad end to a harmless command may come anywhere online."""
    for kind in CommandKind:
        for view in _in_flight(state, kind):
            if view.pending is not None:
                yield view, view.pending
    for kind in HARMLESS if name in _GENERAL and state is not ServerState.OFFLINE else ():
        pending = Pending(commands(kind)[-1], FACTS.cycle, 7, 1.0)
        for view in beliefs(state):
            if not _odd(view) and laws.broken((view,), FACTS) is None:
                yield view._replace(pending=pending), pending


def _answers(state: ServerState, name: EventName) -> Iterator[Case]:
    for view, pending in _awaited(state, name):
        for report in reports(name, pending.command):
            right = Event(name, cycle=pending.cycle, seq=pending.seq, report=report, detail=_WHY)
            yield Case(view, right)
            if not _odd(view):
                yield Case(view, right._replace(seq=right.seq - 1))
                yield Case(view, right._replace(cycle=right.cycle - 1))
                yield Case(view._replace(pending=None), right)


def _ends(state: ServerState, name: EventName) -> Iterator[Case]:
    for view in beliefs(state):
        if laws.broken((view,), FACTS) is None:
            yield Case(view, Event(name, cycle=FACTS.cycle, detail=_WHY))


def cases(key: Key) -> Iterator[Case]:
    """Whatever can happen that one cell answers."""
    state, name = key
    if name in REQUESTS:
        return _requests(state, name)
    if name in (EventName.DIED, EventName.UNCOMMITTED):
        return _ends(state, name)
    return _answers(state, name)


# -- what comes of it ------------------------------------------------------------------------------------


def outcome(case: Case, book: Book) -> Outcome:
    """What some rules make of a case, and the law that is broken."""
    view, event = case
    try:
        made = judge(view, event, FACTS, book)
    except AssertionError as error:
        return Outcome(Verdict.REFUSE, view, f"every_event_has_an_answer: {error}")
    if made.verdict is not Verdict.TAKE:
        return Outcome(made.verdict, view, steps.unheard(view, event, made.verdict, made.rule, made.remedy))
    after = apply(view, event, FACTS, made.row, book)
    return Outcome(made.verdict, after, steps.unlawful(steps.Step(view, event, FACTS, after)))


class Judged(NamedTuple):
    """A cell under changed rules."""

    found: Found | None
    differs: bool
    """Something comes of a case that would not under the rules that ship."""


class Beliefs:
    """What the rules that ship make of everything that one cell answers.

    Raises:
        Unsound: a law is broken.
    """

    def __init__(self, key: Key) -> None:
        self.cases = 0
        self._near: dict[tuple[str, str], list[tuple[Case, Outcome]]] = {}
        for case in cases(key):
            self.cases += 1
            made = outcome(case, BOOK)
            if made.law:
                raise Unsound(made.law)
            for place in _places(case, BOOK.cells[key]):
                self._near.setdefault(place, []).append((case, made))

    def near(self, mutant: Mutant) -> Iterator[tuple[Case, Outcome]]:
        """The cases in which a mutant can lead elsewhere, and what the rules that ship make of them."""
        for place in dict.fromkeys(((mutant.row, mutant.what), (mutant.row, ""))):
            yield from self._near.get(place, ())

    def judge(self, mutant: Mutant) -> Judged:
        """What a mutant makes of it, to the first law that is broken."""
        differs = False
        book = mutant.rule.book
        for case, sound in self.near(mutant):
            made = outcome(case, book)
            if made.law:
                return Judged(Found(made.law, 1), True)
            differs = differs or made != sound
        return Judged(None, differs)


def _places(case: Case, cell: Cell) -> Iterator[tuple[str, str]]:
    """The rows and guards of which a change can lead elsewhere.

    Such are the row that is taken, and, of the rows before it, the guard that alone stands in the way.
    """
    for row in cell:
        fails = [name for name in row.guards if not BOOK.guards[name].holds(case.view, case.event, FACTS)]
        if len(fails) < 2:
            yield row.id, "".join(fails)
        if not fails:
            return
