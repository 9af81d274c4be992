"""Effects: named pure functions that say what a row changes in the view.

A request changes no fact: it notes the command in flight, and counts an intent where counting it
late would be unsafe (a gate that is about to close, a server about to go on). Facts change when an
answer is in.
"""

from collections.abc import Callable

from refitfsm.model.states import ALL_TAGS, Condition, ContentKind, Gate, Tag
from refitfsm.model.values import Command, CommandKind, Content, Event, Facts, Pending, ServerView

Effect = Callable[[ServerView, Event, Facts], ServerView]

EFFECTS: dict[str, Effect] = {}


def _effect(function: Effect) -> Effect:
    EFFECTS[function.__name__] = function
    return function


def _answered(view: ServerView) -> Command:
    """The command in flight. Rows that use it are guarded by `answer_is_expected`."""
    return view.pending.command if view.pending else Command(CommandKind.ENROL)


# -- requests ----------------------------------------------------------------------------------------


@_effect
def note_command(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """The command is in flight, under the next number."""
    if event.command is None:
        return view
    seq = view.seq + 1
    return view._replace(pending=Pending(event.command, event.cycle, seq, event.deadline_s), seq=seq)


@_effect
def start_draining(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """No request is admitted from here on."""
    return view._replace(gate=Gate.DRAINING)


@_effect
def expect_traffic(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """From the moment it is told to go on, the server counts as not paused, its cache as in use."""
    return view._replace(paused=False, kv_epoch=view.content.version)


# -- answers -----------------------------------------------------------------------------------------


@_effect
def settle(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """The command has ended well."""
    return view._replace(pending=None, attempts=0, reason="")


@_effect
def drop_command(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """The command has ended, and not well."""
    return view._replace(pending=None, attempts=view.attempts + 1, reason=event.detail)


@_effect
def note_enrolment(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """A fresh server: everything resident, start-up weights (version 0), its gate still closed."""
    return ServerView(
        server=view.server,
        state=view.state,
        resident=ALL_TAGS,
        content=Content(ContentKind.COMPLETE, version=0, proved=True),
        kv_epoch=0,
        seq=view.seq,
        capabilities=event.report.capabilities,
    )


@_effect
def close_gate(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """Nothing of ours is admitted any more."""
    return view._replace(gate=Gate.CLOSED)


@_effect
def open_gate(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """Requests are admitted."""
    return view._replace(gate=Gate.OPEN)


@_effect
def note_pause(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """Generation is paused: whatever arrives waits."""
    return view._replace(paused=True)


@_effect
def empty_cache(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """The cache holds nothing."""
    return view._replace(kv_epoch=None)


@_effect
def note_release(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """The tags are out. Weights that are not backed up are gone with their memory."""
    tags = _answered(view).tags
    content, checksum = view.content, view.checksum
    if Tag.WEIGHTS in tags:
        content = content._replace(proved=False) if view.capabilities.weights_backup else Content()
        checksum = ""
    return view._replace(
        resident=view.resident - tags, released=view.released | tags, content=content, checksum=checksum
    )


@_effect
def note_resume(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """The tags are resident; what is in them is another fact."""
    tags = _answered(view).tags
    return view._replace(resident=view.resident | tags, released=view.released - tags)


@_effect
def note_session(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """A session is open. It may already have undone the packing of quantised weights."""
    content = Content(ContentKind.PARTIAL, cycle=event.cycle)
    return view._replace(session=event.cycle, content=content, checksum="")


@_effect
def note_foreign_session(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """A session is open that we did not open, and what it wrote is not known. It has to be ended."""
    return view._replace(session=-1, content=Content(ContentKind.PARTIAL, cycle=event.cycle), checksum="")


@_effect
def note_session_end(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """No session is open."""
    return view._replace(session=0)


@_effect
def note_chunk(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """One more chunk is in; the cache, if it holds anything, is stale from here on."""
    command = _answered(view)
    return view._replace(
        content=Content(
            ContentKind.PARTIAL, command.version, event.cycle, command.chunk + 1, command.chunks, proved=False
        ),
        checksum="",
    )


@_effect
def complete_content(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """Every chunk of the model is in."""
    return view._replace(content=view.content._replace(kind=ContentKind.COMPLETE))


@_effect
def note_proof(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """The content is what was pushed. A full push that is proved also ends a quarantine."""
    condition = Condition.HEALTHY if view.condition is Condition.QUARANTINED else view.condition
    return view._replace(
        content=view.content._replace(proved=True), checksum=event.report.checksum, condition=condition
    )


@_effect
def spoil_content(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """Bytes may have moved without the rest: old and new weights may be mixed."""
    content = Content(ContentKind.PARTIAL, cycle=event.cycle)
    return view._replace(content=content, checksum="")


@_effect
def quarantine(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """Only a full push that is proved, or a restart, leads out. A suspect stays suspect, which is worse."""
    worse = view.condition in (Condition.SUSPECT, Condition.RETIRED)
    return view if worse else view._replace(condition=Condition.QUARANTINED)


@_effect
def note_reason(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """Why, in words."""
    return view._replace(reason=event.detail)


@_effect
def suspect(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """Nothing is sent to it before a restart."""
    return view._replace(condition=Condition.SUSPECT)


@_effect
def forget_residency(view: ServerView, _event: Event, _facts: Facts) -> ServerView:
    """The tags of the command are neither known resident nor known released."""
    tags = _answered(view).tags
    content = Content() if Tag.WEIGHTS in tags else view.content
    return view._replace(
        resident=view.resident - tags, released=view.released - tags, content=content, checksum=""
    )


@_effect
def take_offline(view: ServerView, event: Event, _facts: Facts) -> ServerView:
    """The process is gone, and everything that was true of it."""
    return ServerView(server=view.server, seq=view.seq, capabilities=view.capabilities, reason=event.detail)
