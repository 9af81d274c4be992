"""Laws of single steps of one server: over its view before, what happened, and its view after.

The laws of views say what a server may be; these say what the table may make of it. What is sent finds the
server as it has to be, and changes no fact; an answer is believed, and nothing beside what it says.
"""

from collections.abc import Callable
from typing import NamedTuple

from refitfsm.model.commands import COMMANDS, LostMeans
from refitfsm.model.fleet import holds_served
from refitfsm.model.row import Verdict
from refitfsm.model.states import ALL_TAGS, Condition, ContentKind, Gate, ServerState, Tag
from refitfsm.model.values import (
    DONE,
    REQUESTS,
    Capabilities,
    Command,
    CommandKind,
    Content,
    Event,
    EventName,
    Facts,
    Pending,
    ServerView,
)


class Step(NamedTuple):
    """A row was taken."""

    before: ServerView
    event: Event
    facts: Facts
    after: ServerView

    @property
    def asked(self) -> Command | None:
        """What is sent, if it is a request."""
        return self.event.command if self.event.name in REQUESTS else None

    @property
    def answered(self) -> Command | None:
        """What is answered, if it is an answer."""
        pending = self.before.pending
        return pending.command if pending and self.event.name in _ANSWERS else None


class Law(NamedTuple):
    """A law over one step."""

    name: str
    holds: Callable[[Step], bool]
    says: str


_BAD = (EventName.REFUSED, EventName.FAILED, EventName.LOST)
_ANSWERS = frozenset({*DONE.values(), *_BAD})
_TOUCHING = frozenset({CommandKind.RELEASE, CommandKind.BEGIN, CommandKind.PUSH})
_UNPAUSED = frozenset({CommandKind.ENROL, CommandKind.DRAIN, CommandKind.PAUSE, CommandKind.CONTINUE})
_OF_WEIGHTS = frozenset({CommandKind.BEGIN, CommandKind.PUSH, CommandKind.END, CommandKind.VERIFY})


# -- requests ----------------------------------------------------------------------------------------

_Fits = Callable[[ServerView, Command, Step], bool]


def _whole(view: ServerView) -> bool:
    return view.content.kind is ContentKind.COMPLETE


def _session_is_due(view: ServerView, _command: Command, step: Step) -> bool:
    return view.session == (step.event.cycle if view.capabilities.sessions else 0)


def _chunk_is_due(view: ServerView, command: Command, step: Step) -> bool:
    if command.chunk == 0:
        return command.chunks > 0
    done, whole = command.chunk, command.chunks
    expected = Content(ContentKind.PARTIAL, command.version, step.event.cycle, done, whole)
    return done < whole and view.content == expected


def _may_go_on(view: ServerView, _command: Command, _step: Step) -> bool:
    fits = view.kv_epoch in (None, view.content.version)
    return view.everything_resident and view.session == 0 and view.content.proved and fits


_FITS: tuple[tuple[frozenset[CommandKind], _Fits], ...] = (
    (frozenset(CommandKind), lambda v, _c, _s: v.pending is None),
    (frozenset(CommandKind), lambda v, _c, _s: v.condition not in (Condition.SUSPECT, Condition.RETIRED)),
    (frozenset({CommandKind.ENROL}), lambda v, _c, _s: v.state is ServerState.OFFLINE),
    (frozenset(CommandKind) - {CommandKind.ENROL}, lambda v, _c, _s: v.state is not ServerState.OFFLINE),
    (frozenset({CommandKind.DRAIN}), lambda v, _c, _s: v.gate is not Gate.CLOSED),
    (frozenset(CommandKind) - {CommandKind.DRAIN}, lambda v, _c, _s: v.gate is Gate.CLOSED),
    (frozenset(CommandKind) - _UNPAUSED, lambda v, _c, _s: v.paused),
    (_TOUCHING, lambda v, _c, _s: v.kv_epoch is None),
    (frozenset({CommandKind.FLUSH}), lambda v, _c, _s: Tag.KV_CACHE in v.resident),
    (frozenset({CommandKind.RELEASE}), lambda v, c, _s: bool(c.tags) and c.tags <= v.resident),
    (frozenset({CommandKind.RELEASE}), lambda v, _c, _s: v.capabilities.memory_saver and v.session == 0),
    (frozenset({CommandKind.RESUME}), lambda v, c, _s: bool(c.tags) and c.tags <= v.released),
    (
        frozenset({CommandKind.RESUME}),
        lambda v, c, _s: c.tags == {Tag.WEIGHTS} or (_whole(v) and v.content.proved and v.session == 0),
    ),
    (
        frozenset({CommandKind.RESUME}),
        lambda v, c, _s: c.tags == {Tag.WEIGHTS} or Tag.WEIGHTS in v.resident,
    ),
    (_OF_WEIGHTS, lambda v, _c, _s: Tag.WEIGHTS in v.resident),
    (frozenset({CommandKind.BEGIN}), lambda v, _c, _s: v.capabilities.sessions and v.session == 0),
    (frozenset({CommandKind.PUSH}), _session_is_due),
    (frozenset({CommandKind.PUSH}), lambda _v, c, s: c.version > s.facts.serving_version),
    (frozenset({CommandKind.PUSH}), _chunk_is_due),
    (frozenset({CommandKind.END}), lambda v, _c, _s: v.session != 0),
    (frozenset({CommandKind.VERIFY}), lambda v, _c, _s: v.session == 0 and _whole(v)),
    (
        frozenset({CommandKind.CONTINUE}),
        lambda v, c, s: holds_served(v, s.facts) and c.version == s.facts.serving_version,
    ),
    (frozenset({CommandKind.CONTINUE}), _may_go_on),
)
"""How a server has to be where a command is sent to it."""


def _finds_its_server(step: Step) -> bool:
    command = step.asked
    return command is None or all(
        fits(step.before, command, step) for kinds, fits in _FITS if command.kind in kinds
    )


def _changes_no_fact(step: Step) -> bool:
    command, before = step.asked, step.before
    if command is None:
        return True
    seq = before.seq + 1
    expected = before._replace(
        seq=seq, pending=Pending(command, step.event.cycle, seq, step.event.deadline_s)
    )
    if command.kind is CommandKind.DRAIN:
        expected = expected._replace(gate=Gate.DRAINING)
    elif command.kind is CommandKind.CONTINUE:
        expected = expected._replace(paused=False, kv_epoch=before.content.version)
    return step.after == expected


# -- answers -----------------------------------------------------------------------------------------

_Believed = Callable[[ServerView, Command, Event], bool]


def _pushed(after: ServerView, command: Command, event: Event) -> bool:
    done = command.chunk + 1
    kind = ContentKind.COMPLETE if done == command.chunks else ContentKind.PARTIAL
    whole = Content(kind, command.version, event.cycle, done, command.chunks)
    return (after.content, after.checksum) == (whole, "")


def _verified(after: ServerView, command: Command, event: Event) -> bool:
    if event.report.version == command.version:
        return after.content.proved and after.condition is Condition.HEALTHY
    return not _whole(after) and after.condition is not Condition.HEALTHY


def _enrolled(after: ServerView, _command: Command, event: Event) -> bool:
    serves = not event.report.paused
    able = event.report.capabilities if serves else Capabilities()
    believed = (after.state is ServerState.SERVING, after.resident == ALL_TAGS)
    return believed == (serves, serves) and (not serves or after.capabilities == able)


_MEANS: dict[EventName, _Believed] = {
    EventName.ENROLLED: _enrolled,
    EventName.DRAINED: lambda after, _c, _e: after.gate is Gate.CLOSED,
    EventName.PAUSED: lambda after, _c, _e: after.paused,
    EventName.FLUSHED: lambda after, _c, _e: after.kv_epoch is None,
    EventName.RELEASED: lambda after, c, _e: c.tags <= after.released and not c.tags & after.resident,
    EventName.RESUMED: lambda after, c, _e: c.tags <= after.resident and not c.tags & after.released,
    EventName.BEGUN: lambda after, _c, event: after.session == event.cycle and not _whole(after),
    EventName.PUSHED: _pushed,
    EventName.ENDED: lambda after, _c, _e: after.session == 0,
    EventName.VERIFIED: _verified,
    EventName.CONTINUED: lambda after, _c, _e: (after.state, after.gate) == (ServerState.SERVING, Gate.OPEN),
}
"""What is believed when a command has ended well."""


def _is_believed(step: Step) -> bool:
    means, command = _MEANS.get(step.event.name), step.answered
    return means is None or command is None or means(step.after, command, step.event)


def _is_of_others(step: Step, command: Command) -> bool:
    """Whether an answer says that a session is not ours, or is ours no more.

    One that opens once this cycle has written was not left over from before: that is no news.
    """
    opened = step.event.report.session_open and command.kind is CommandKind.BEGIN
    closed = step.event.report.session_closed and command.kind is CommandKind.END
    return closed or (opened and step.before.content.cycle != step.event.cycle)


_DESTINATIONS = {
    EventName.RELEASED: ServerState.RELEASED,
    EventName.RESUMED: ServerState.WEIGHTS_STAGED,
    EventName.BEGUN: ServerState.WEIGHTS_STAGED,
    EventName.PUSHED: ServerState.WEIGHTS_STAGED,
    EventName.CONTINUED: ServerState.SERVING,
}
"""Where good answers lead, whatever the state was; others leave it."""


def _destination(step: Step, command: Command) -> ServerState:
    before, event = step.before, step.event
    if event.name in (EventName.FAILED, EventName.LOST):
        return _in_doubt(before, COMMANDS[command.kind].lost_means)
    if event.name is EventName.FLUSHED and before.state is ServerState.WEIGHTS_STAGED:
        ready = before.everything_resident and before.content.proved and before.session == 0
        return ServerState.KV_REBUILT if ready else before.state
    dirty = before.kv_epoch is not None
    if event.name is EventName.PAUSED and before.state is ServerState.KV_REBUILT and dirty:
        return ServerState.WEIGHTS_STAGED
    opened = event.name is EventName.REFUSED and command.kind is CommandKind.BEGIN
    if opened and _is_of_others(step, command):
        return ServerState.WEIGHTS_STAGED
    if event.name is EventName.ENROLLED and not event.report.paused:
        return ServerState.SERVING
    return _DESTINATIONS.get(event.name, before.state)


def _in_doubt(before: ServerView, means: LostMeans) -> ServerState:
    if means is LostMeans.CONTENT_UNKNOWN:
        return ServerState.WEIGHTS_STAGED
    whole = before.state in (ServerState.SERVING, ServerState.KV_REBUILT)
    return ServerState.RELEASED if whole and means is LostMeans.RESIDENCY_UNKNOWN else before.state


def _leads_on(step: Step) -> bool:
    return step.answered is None or step.after.state is _destination(step, step.answered)


def _is_expected(before: ServerView, event: Event) -> bool:
    pending = before.pending
    if pending is None or (event.cycle, event.seq) != (pending.cycle, pending.seq):
        return False
    return event.name in _BAD or event.name is DONE[pending.command.kind]


def _is_of_what_is_in_flight(step: Step) -> bool:
    return step.event.name not in _ANSWERS or _is_expected(step.before, step.event)


def _ends_its_command(step: Step) -> bool:
    return step.event.name in REQUESTS or step.after.pending is None


def _is_kept_in_words(step: Step) -> bool:
    ends_badly = step.after.attempts > step.before.attempts
    ends_badly = ends_badly or step.event.name in (EventName.DIED, EventName.UNCOMMITTED)
    return not ends_badly or step.after.reason == step.event.detail


def _doubts(step: Step) -> bool:
    command, after, name = step.answered, step.after, step.event.name
    if command is None or name not in (EventName.FAILED, EventName.LOST):
        return True
    means = COMMANDS[command.kind].lost_means
    if means is LostMeans.REPEAT:
        return True
    moved = (after.resident | after.released) & command.tags
    known = moved if means is LostMeans.RESIDENCY_UNKNOWN else _whole(after) or after.content.proved
    condition = after.condition
    if name is EventName.LOST or means is LostMeans.RESIDENCY_UNKNOWN:
        return not known and condition is Condition.SUSPECT
    return not known and condition is not Condition.HEALTHY


def _changed_nothing(step: Step) -> bool:
    command, before, event = step.answered, step.before, step.event
    if command is None or event.name not in _BAD:
        return True
    if event.name is EventName.REFUSED and _is_of_others(step, command):
        return True
    if event.name is not EventName.REFUSED and COMMANDS[command.kind].lost_means is not LostMeans.REPEAT:
        return True
    return step.after == before._replace(pending=None, attempts=before.attempts + 1, reason=event.detail)


def _good_ends_are_counted(step: Step) -> bool:
    if step.event.name not in DONE.values():
        return True
    bad = step.after.state is ServerState.OFFLINE or step.after.condition is not Condition.HEALTHY
    return bad or (step.after.attempts, step.after.reason) == (0, "")


def _other_sessions_are_noticed(step: Step) -> bool:
    command, after = step.answered, step.after
    if command is None or step.event.name is not EventName.REFUSED or not _is_of_others(step, command):
        return True
    return after.session == (-1 if command.kind is CommandKind.BEGIN else 0) and not _whole(after)


# -- ends --------------------------------------------------------------------------------------------


def _offline_by_death(step: Step) -> bool:
    before, after = step.before, step.after
    if step.event.name is EventName.DIED:
        return after == ServerView(
            before.server, seq=before.seq, capabilities=before.capabilities, reason=step.event.detail
        )
    return after.state is not ServerState.OFFLINE or before.state is ServerState.OFFLINE


def _online_by_enrolment(step: Step) -> bool:
    online = step.before.state is ServerState.OFFLINE and step.after.state is not ServerState.OFFLINE
    return not online or step.event.name is EventName.ENROLLED


def _uncommitted(step: Step) -> bool:
    if step.event.name is not EventName.UNCOMMITTED:
        return True
    doubted = step.before._replace(condition=Condition.QUARANTINED, reason=step.event.detail)
    return step.after == doubted and step.before.content.cycle == step.event.cycle


def _opens_by_going_on(step: Step) -> bool:
    closed = step.before.gate is Gate.CLOSED and step.after.gate is not Gate.CLOSED
    return not closed or step.event.name is EventName.CONTINUED


def _serves_by_going_on(step: Step) -> bool:
    other = step.before.state is not ServerState.SERVING and step.after.state is ServerState.SERVING
    return not other or step.event.name in (EventName.ENROLLED, EventName.CONTINUED)


LAWS: tuple[Law, ...] = (
    Law("what_is_sent_finds_its_server", _finds_its_server, "Memory, gate, session and weights allow it."),
    Law(
        "a_request_changes_no_fact", _changes_no_fact, "It is in flight, a gate drains, traffic is expected."
    ),
    Law(
        "a_late_answer_changes_nothing",
        _is_of_what_is_in_flight,
        "Nor does one to another command than the one in flight.",
    ),
    Law("an_answer_ends_its_command", _ends_its_command, "Nothing is in flight after it."),
    Law("an_answer_is_believed", _is_believed, "What it says of the server is so from then on."),
    Law("a_good_end_starts_the_count_anew", _good_ends_are_counted, "No attempt is held against the next."),
    Law("what_went_wrong_is_kept_in_words", _is_kept_in_words, "A bad end leaves its reason."),
    Law("what_is_not_known_is_not_believed", _doubts, "What may have moved is doubted, and the server too."),
    Law("a_harmless_end_changes_nothing", _changed_nothing, "It is counted, and everything is as it was."),
    Law("sessions_of_others_are_noticed", _other_sessions_are_noticed, "And the weights are not whole then."),
    Law("only_the_dead_go_offline", _offline_by_death, "And nothing is believed of them."),
    Law("an_enrolment_leads_online", _online_by_enrolment, "And nothing else does."),
    Law("an_answer_leads_on", _leads_on, "To the state that says what the server is from then on."),
    Law("what_did_not_commit_is_quarantined", _uncommitted, "It, and nothing else, and nothing more of it."),
    Law("a_gate_opens_by_going_on", _opens_by_going_on, "And by nothing else."),
    Law("a_server_serves_by_going_on", _serves_by_going_on, "Or as it was enrolled."),
)


def unlawful(step: Step) -> str:
    """The first law that a step breaks, as a sentence; empty if none."""
    for law in LAWS:
        if not law.holds(step):
            return f"{law.name}: {law.says} {step.event.name} in {step.before.state}."
    return ""


def unheard(before: ServerView, event: Event, verdict: Verdict, rule: str, remedy: str) -> str:
    """The law that is broken where nothing is taken, as a sentence; empty if none."""
    if event.name in REQUESTS:
        said = verdict is Verdict.REFUSE and rule and remedy
        return "" if said else f"a_refusal_says_why: {event.name} in {before.state}"
    if verdict is not Verdict.IGNORE:
        return f"what_happened_is_not_refused: {event.name} in {before.state}"
    if event.name is EventName.DIED:
        return f"only_the_dead_go_offline: {before.state} ignores {event.name}"
    if event.name in _ANSWERS and _is_expected(before, event):
        return f"an_answer_ends_its_command: {event.name} in {before.state}"
    written = before.state in (ServerState.WEIGHTS_STAGED, ServerState.KV_REBUILT)
    trusted = before.condition not in (Condition.SUSPECT, Condition.RETIRED)
    if event.name is EventName.UNCOMMITTED and written and trusted and before.content.cycle == event.cycle:
        return f"what_did_not_commit_is_quarantined: {event.name} in {before.state}"
    return ""
