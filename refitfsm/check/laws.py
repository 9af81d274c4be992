"""Laws of a small fleet, over what is believed and what is so, checked on every state that is reached."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from refitfsm.check.moves import State
from refitfsm.check.truth import UNDEFINED, TrueServer
from refitfsm.model.laws import LAWS
from refitfsm.model.row import Verdict
from refitfsm.model.states import ALL_TAGS, Condition, ContentKind, Gate, ServerState
from refitfsm.model.table import Book
from refitfsm.model.values import (
    DONE,
    NOTHING_REPORTED,
    Event,
    EventName,
    Facts,
    Report,
    ServerView,
)
from refitfsm.planner.judge import judge

LawOfTruth = Callable[[ServerView, TrueServer, int], bool]
"""Of what is believed and what is so, and of the push whose weights the fleet serves."""


class Law(NamedTuple):
    """A law over one server of a state: what is believed of it and what it is."""

    name: str
    when: LawOfTruth
    """Where it says anything: where it is at risk."""
    then: LawOfTruth
    says: str


def _known(view: ServerView, true: TrueServer) -> bool:
    """Nothing is in flight, nothing is doubted, and the process is the one that was enrolled."""
    online = view.state is not ServerState.OFFLINE
    return (
        online
        and view.pending is None
        and view.condition is not Condition.SUSPECT
        and true.alive
        and true.same
    )


LAWS_OF_TRUTH: tuple[Law, ...] = (
    Law(
        "an_open_gate_leads_to_the_fleets_weights",
        lambda view, true, _s: view.gate is Gate.OPEN and true.alive and true.same,
        lambda _v, true, serving: true.push == serving,
        "A request that is admitted is answered by the weights that the fleet serves, whole.",
    ),
    Law(
        "an_open_gate_leads_to_no_stale_cache",
        lambda view, true, _s: view.gate is Gate.OPEN and true.alive and true.same,
        lambda _v, true, serving: true.cache <= {serving},
        "No answer uses a cache that other weights made.",
    ),
    Law(
        "what_runs_is_whole",
        lambda _v, true, _s: true.alive and true.same and not true.paused,
        lambda _v, true, _s: (
            true.resident == ALL_TAGS and true.push != UNDEFINED and true.cache <= {true.push}
        ),
        "A server that is not paused, to strangers too, has all of its memory, whole weights, their cache.",
    ),
    Law(
        "belief_of_memory_is_true",
        lambda view, true, _s: _known(view, true),
        lambda view, true, _s: view.resident == true.resident and view.released == ALL_TAGS - true.resident,
        "What is believed resident is resident, and what is believed released is released.",
    ),
    Law(
        "belief_of_a_pause_is_true",
        lambda view, true, _s: _known(view, true) and view.paused,
        lambda _v, true, _s: true.paused,
        "A server that is believed paused is.",
    ),
    Law(
        "belief_of_a_session_is_true",
        lambda view, true, _s: _known(view, true) and view.condition is Condition.HEALTHY,
        lambda view, true, _s: (view.session != 0) == true.session,
        "On a healthy server a session is open where one is believed open, and nowhere else.",
    ),
    Law(
        "proved_content_is_what_it_is_believed_to_be",
        lambda view, true, _s: (
            _known(view, true) and view.content.kind is ContentKind.COMPLETE and view.content.proved
        ),
        lambda view, true, _s: true.push == view.content.cycle,
        "Weights that are believed whole and proved are those of the push that is believed.",
    ),
    Law(
        "an_empty_cache_is_empty",
        lambda view, true, _s: _known(view, true) and view.kv_epoch is None,
        lambda _v, true, _s: not true.cache,
        "A cache that is believed empty holds nothing.",
    ),
)


_ANSWERS = (*DONE.values(), EventName.REFUSED, EventName.FAILED, EventName.LOST)


def moved_by_a_late_answer(view: ServerView, facts: Facts, book: Book) -> str:
    """The law that an answer to an earlier command breaks by what it changes; empty if none can."""
    pending = view.pending
    cycle = pending.cycle if pending else facts.cycle
    full = Report(session_open=True, session_closed=True, version=pending.command.version if pending else -1)
    for name, report in product(_ANSWERS, (NOTHING_REPORTED, full)):
        late = Event(name, cycle=cycle, seq=view.seq - 1, report=report)
        if judge(view, late, facts, book).verdict is not Verdict.IGNORE:
            return f"a_late_answer_changes_nothing: {view.server} takes {name} of an earlier command"
    return ""


def broken_by(view: ServerView, true: TrueServer, facts: Facts, serving: int, risks: Counter[str]) -> str:
    """The first law that one server breaks, as a sentence; empty if none. Counts what was at risk."""
    for law in LAWS:
        if law.when(view, facts):
            risks[law.name] += 1
            if not law.then(view, facts):
                return f"{law.name}: {law.says} Broken by {view.server}."
    for other in LAWS_OF_TRUTH:
        if other.when(view, true, serving):
            risks[other.name] += 1
            if not other.then(view, true, serving):
                return f"{other.name}: {other.says} Broken by {view.server}."
    return ""


def broken(state: State, risks: Counter[str] | None = None) -> str:
    """The first law that a state breaks, as a sentence; empty if none."""
    facts, risks = state.fleet.facts, Counter() if risks is None else risks
    for view, true in zip(state.fleet.servers.values(), state.truth, strict=True):
        why = broken_by(view, true, facts, state.serving, risks)
        if why:
            return why
    return ""
