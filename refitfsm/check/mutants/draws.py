"""Beliefs and events drawn at random: the second look at single steps, which takes no list for complete.

Every fact of a view is drawn by itself, most often as it is of a server that is quiet. An answer is drawn for
a command that the rules that ship have taken, from a belief that was drawn as well.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

from refitfsm.check.mutants.beliefs import FACTS, HARMLESS, NAME, Case, commands, outcome, reports
from refitfsm.check.mutants.graph import Found
from refitfsm.check.mutants.rules import Mutant
from refitfsm.model.row import Verdict
from refitfsm.model.states import ALL_TAGS, Condition, ContentKind, Gate, ServerState, Tag
from refitfsm.model.table import BOOK, Key
from refitfsm.model.values import (
    DONE,
    REQUESTS,
    Capabilities,
    Command,
    CommandKind,
    Content,
    Event,
    EventName,
    Pending,
    ServerView,
)

DRAWS = 8_000
"""For each mutant, until a law is broken."""
_USUAL = 0.7
"""How often a fact is as it is of a server that is quiet."""
_TRIES = 40
"""To find a belief from which a command is sent."""
_HARMLESS_OFTEN = 0.2
"""How often a bad end is that of a harmless command, which may be in flight anywhere."""
_ASKED = {
    state: tuple(
        kind
        for kind in CommandKind
        if any(row.verdict is Verdict.TAKE for row in BOOK.cells[state, EventName(kind.value)])
    )
    for state in ServerState
}
"""What is ever sent in a state."""
_KINDS = {name: kind for kind, name in DONE.items()}
_WORDS = "why"
_T = TypeVar("_T")


def _or_else(dice: random.Random, usual: _T, others: Sequence[_T]) -> _T:
    return usual if dice.random() < _USUAL else dice.choice(others)


def belief(state: ServerState, dice: random.Random) -> ServerView:
    """Whatever may be believed of a server in a state, with nothing in flight."""
    seq = dice.randrange(9)
    able = Capabilities(
        sessions=dice.random() < 0.5,
        memory_saver=_or_else(dice, True, (False,)),
        weights_backup=_or_else(dice, False, (True,)),
    )
    if state is ServerState.OFFLINE:
        return ServerView(NAME, seq=seq, capabilities=able, reason=dice.choice(("", _WORDS)))
    places = {tag: dice.randrange(5) for tag in Tag}
    resident = frozenset(tag for tag, place in places.items() if place > 1)
    return ServerView(
        NAME,
        state,
        dice.choice((resident, ALL_TAGS)),
        frozenset(tag for tag, place in places.items() if place == 1),
        content(dice),
        kv_epoch=_or_else(dice, None, (2, 3, 4)),
        gate=_or_else(dice, Gate.CLOSED, tuple(Gate)),
        paused=_or_else(dice, True, (False,)),
        session=dice.choice((0, 0, FACTS.cycle, FACTS.cycle, -1)),
        seq=seq,
        attempts=dice.randrange(3),
        capabilities=able,
        condition=_or_else(dice, Condition.HEALTHY, tuple(Condition)),
        reason=dice.choice(("", "before")),
    )


def content(dice: random.Random) -> Content:
    """Whatever a server's weights may be."""
    kind = dice.choice(tuple(ContentKind))
    if kind is ContentKind.UNDEFINED:
        return Content()
    version, cycle = dice.choice(((3, 4), (4, 5), (4, 5), (4, 2)))
    if kind is ContentKind.PARTIAL:
        return dice.choice((Content(kind, cycle=cycle), Content(kind, version, cycle, 1, 2)))
    return Content(kind, version, cycle, 2, 2, proved=dice.random() < _USUAL)


def command(kind: CommandKind, dice: random.Random) -> Command:
    """A command of a kind."""
    if kind in (CommandKind.RELEASE, CommandKind.RESUME):
        tags = frozenset(tag for tag in Tag if dice.random() < 0.5)
        return Command(kind, tags=dice.choice((tags, frozenset({Tag.WEIGHTS}))))
    return dice.choice(commands(kind))


def _request(state: ServerState, kind: CommandKind, dice: random.Random) -> Case:
    view = belief(state, dice)
    if dice.random() > 0.9:
        view = view._replace(pending=Pending(Command(CommandKind.FLUSH), FACTS.cycle, view.seq, 1.0))
    return Case(view, Event(EventName(kind.value), command(kind, dice), FACTS.cycle, deadline_s=1.0))


def _sent(state: ServerState, name: EventName, dice: random.Random) -> ServerView:
    """A server that a command was sent to, if one was found that the rules that ship allow."""
    if name not in _KINDS and state is not ServerState.OFFLINE and dice.random() < _HARMLESS_OFTEN:
        view = belief(state, dice)
        kind = dice.choice(HARMLESS)
        return view._replace(pending=Pending(command(kind, dice), FACTS.cycle, view.seq, 1.0))
    wanted = _KINDS.get(name)
    kinds = tuple(kind for kind in _ASKED[state] if wanted in (None, kind))
    for _ in range(_TRIES if kinds else 0):
        kind = dice.choice(kinds)
        made = outcome(_request(state, kind, dice), BOOK)
        if made.verdict is Verdict.TAKE:
            return made.view
    return belief(state, dice)


def draw(key: Key, dice: random.Random) -> Case:
    """Something that one cell answers."""
    state, name = key
    if name in REQUESTS:
        return _request(state, CommandKind(name.value), dice)
    if name in (EventName.DIED, EventName.UNCOMMITTED):
        return Case(belief(state, dice), Event(name, cycle=dice.choice((2, 4, 5)), detail=_WORDS))
    view = _sent(state, name, dice)
    pending = view.pending
    if pending is None:
        return Case(view, Event(name, cycle=FACTS.cycle, seq=view.seq, detail=_WORDS))
    cycle = _or_else(dice, pending.cycle, (pending.cycle - 1, pending.cycle))
    seq = _or_else(dice, pending.seq, (pending.seq - 1, pending.seq))
    report = dice.choice(tuple(reports(name, pending.command)))
    return Case(view, Event(name, cycle=cycle, seq=seq, report=report, detail=_WORDS))


def drawn(mutant: Mutant, dice: random.Random) -> Found | None:
    """The law that a mutant breaks in a step that is drawn, if one does."""
    rule = mutant.rule
    for _ in range(DRAWS):
        case = draw(rule.key, dice)
        made = outcome(case, rule.book)
        if made.law:
            return Found(made.law, 1)
    return None
