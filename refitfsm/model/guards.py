"""Guards: named predicates over a server's view, an event and the fleet's facts.

A guard's name reads as a true sentence when the guard holds. Its remedy says what to do when it does
not: both are shown to whoever asked for the command.
"""

from collections.abc import Callable
from typing import NamedTuple

from refitfsm.model.commands import COMMANDS, LostMeans
from refitfsm.model.fleet import holds_served
from refitfsm.model.states import Condition, ContentKind, Gate, Tag
from refitfsm.model.values import DONE, CommandKind, Event, EventName, Facts, ServerView

Predicate = Callable[[ServerView, Event, Facts], bool]


class Guard(NamedTuple):
    """A predicate with its name, what it protects from, and the remedy when it fails."""

    name: str
    holds: Predicate
    remedy: str


GUARDS: dict[str, Guard] = {}


def _guard(remedy: str) -> Callable[[Predicate], Predicate]:
    def register(predicate: Predicate) -> Predicate:
        name = predicate.__name__
        GUARDS[name] = Guard(name, predicate, remedy)
        return predicate

    return register


# -- may anything be asked of this server at all ---------------------------------------------------


@_guard("wait until the command in flight has ended")
def nothing_is_pending(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.pending is None


@_guard("what its last command did is not known: restart the server, then enrol it again")
def server_is_trusted(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.condition not in (Condition.SUSPECT, Condition.RETIRED)


# -- quiescence --------------------------------------------------------------------------------------


@_guard("the gate is closed already: nothing is left to drain")
def gate_is_not_closed(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.gate is not Gate.CLOSED


@_guard("drain the server first, so that no request of ours is admitted any more")
def gate_is_closed(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.gate is Gate.CLOSED


@_guard("pause generation first: a paused server lets strangers' requests and probes wait instead of dying")
def server_is_paused(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.paused


@_guard("flush the cache first: an accepted flush is also the only proof that the server is idle")
def cache_is_empty(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.kv_epoch is None


# -- residency ---------------------------------------------------------------------------------------


@_guard("name the tags: an empty list means all tags to SGLang")
def tags_are_named(_view: ServerView, event: Event, _facts: Facts) -> bool:
    return event.command is not None and bool(event.command.tags)


@_guard("leave out the tags that are released already: SGLang exits when memory is released twice")
def tags_are_resident(view: ServerView, event: Event, _facts: Facts) -> bool:
    return event.command is not None and event.command.tags <= view.resident


@_guard("leave out the tags that are resident: SGLang dies when memory is resumed that was not released")
def tags_are_released(view: ServerView, event: Event, _facts: Facts) -> bool:
    return event.command is not None and event.command.tags <= view.released


@_guard("start the server with --enable-memory-saver, or use a policy that releases nothing (always_on)")
def memory_saver_is_on(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.capabilities.memory_saver


@_guard(
    "resume the weights first, in a command of their own: the rest needs the room only once they are right"
)
def weights_come_first(view: ServerView, event: Event, _facts: Facts) -> bool:
    if event.command is None:
        return False
    alone = event.command.tags == {Tag.WEIGHTS}
    return alone or (Tag.WEIGHTS in view.resident and Tag.WEIGHTS not in event.command.tags)


@_guard("push and verify the whole model before the KV cache is resumed")
def content_allows_the_tags(view: ServerView, event: Event, _facts: Facts) -> bool:
    if event.command is None:
        return False
    return event.command.tags == {Tag.WEIGHTS} or (
        view.content.kind is ContentKind.COMPLETE and view.content.proved
    )


@_guard("resume the weights before touching them")
def weights_are_resident(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return Tag.WEIGHTS in view.resident


@_guard("resume the KV cache before flushing it: some servers die otherwise")
def cache_is_resident(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return Tag.KV_CACHE in view.resident


@_guard("resume what is still released")
def everything_is_resident(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.everything_resident


# -- content -----------------------------------------------------------------------------------------


@_guard("this server takes weights without a session: push at once")
def server_has_sessions(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.capabilities.sessions


@_guard("end the session that is open first")
def session_is_closed(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.session == 0


@_guard("no session is open: nothing is left to end")
def session_is_open(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.session != 0


@_guard("begin a weight-update session in this cycle first")
def session_is_ready(view: ServerView, event: Event, _facts: Facts) -> bool:
    return view.session == event.cycle if view.capabilities.sessions else view.session == 0


@_guard("push the chunks in order, each once, from the first")
def chunk_is_next(view: ServerView, event: Event, _facts: Facts) -> bool:
    if event.command is None or not 0 <= event.command.chunk < event.command.chunks:
        return False
    if event.command.chunk == 0:
        return True
    content = view.content
    return (
        content.kind is ContentKind.PARTIAL
        and content.cycle == event.cycle
        and content.version == event.command.version
        and content.chunks_total == event.command.chunks
        and content.chunks_done == event.command.chunk
    )


@_guard("push every chunk of the model first")
def content_is_complete(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.content.kind is ContentKind.COMPLETE


@_guard("verify the weights first: a 200 alone proves nothing")
def content_is_proved(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.content.kind is ContentKind.COMPLETE and view.content.proved


@_guard("push a version above the one that the fleet serves")
def version_is_newer(_view: ServerView, event: Event, facts: Facts) -> bool:
    return event.command is not None and event.command.version > facts.serving_version


@_guard("wait for the fleet's commit: a server serves the fleet's version or nothing")
def version_is_committed(view: ServerView, event: Event, facts: Facts) -> bool:
    return (
        event.command is not None
        and event.command.version == facts.serving_version
        and holds_served(view, facts)
        and view.content.proved
    )


@_guard("flush the cache: it may hold entries that other weights made")
def cache_fits_the_weights(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.kv_epoch is None or (
        view.content.kind is ContentKind.COMPLETE and view.kv_epoch == view.content.version
    )


# -- answers -----------------------------------------------------------------------------------------


@_guard("the answer belongs to no command in flight: it is recorded and dropped")
def answer_is_expected(view: ServerView, event: Event, _facts: Facts) -> bool:
    pending = view.pending
    if pending is None or (event.cycle, event.seq) != (pending.cycle, pending.seq):
        return False
    general = event.name in (EventName.REFUSED, EventName.FAILED, EventName.LOST)
    return general or event.name is DONE[pending.command.kind]


@_guard("nothing of this cycle was written to it")
def cycle_has_written(view: ServerView, event: Event, _facts: Facts) -> bool:
    return view.content.cycle == event.cycle


@_guard("something of this cycle was written to it already")
def cycle_has_not_written(view: ServerView, event: Event, _facts: Facts) -> bool:
    return view.content.cycle != event.cycle


@_guard("the last chunk is still to come")
def chunk_is_last(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return view.pending is not None and view.pending.command.chunk + 1 == view.pending.command.chunks


def _lost_means(view: ServerView, meaning: LostMeans) -> bool:
    return view.pending is not None and COMMANDS[view.pending.command.kind].lost_means is meaning


@_guard("the command moves memory, not weights")
def command_moves_memory(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return _lost_means(view, LostMeans.RESIDENCY_UNKNOWN)


@_guard("the command moves weights, not memory")
def command_moves_weights(view: ServerView, _event: Event, _facts: Facts) -> bool:
    return _lost_means(view, LostMeans.CONTENT_UNKNOWN)


@_guard("the refusal has another reason: the cycle decides")
def refusal_is_of_an_open_session(view: ServerView, event: Event, _facts: Facts) -> bool:
    return (
        view.pending is not None
        and view.pending.command.kind is CommandKind.BEGIN
        and event.report.session_open
    )


@_guard("the refusal has another reason: the cycle decides")
def refusal_is_of_a_closed_session(view: ServerView, event: Event, _facts: Facts) -> bool:
    return (
        view.pending is not None
        and view.pending.command.kind is CommandKind.END
        and event.report.session_closed
    )


@_guard("the server reports another version than the one that was pushed: push again")
def version_is_the_one_pushed(view: ServerView, event: Event, _facts: Facts) -> bool:
    return view.pending is not None and event.report.version == view.pending.command.version


@_guard("the server is paused by somebody else: let its owner go on with it, or restart it")
def server_is_unowned(_view: ServerView, event: Event, _facts: Facts) -> bool:
    return not event.report.paused
