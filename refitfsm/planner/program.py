"""The order of a cycle, as data: for each goal, the steps and when each is needed.

A server's next command is the first step of the list that is needed. There is no program counter:
what has been done is read from the view, so a cycle that starts from any state, or goes on after a
lost answer, finds its place by itself. Whether the step is *legal* is the table's business.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from refitfsm.model.fleet import Cycle, Goal, holds_served
from refitfsm.model.rules import Rules
from refitfsm.model.states import ContentKind, Gate, ServerState, Tag
from refitfsm.model.values import Command, CommandKind, Facts, ServerView

Needed = Callable[[ServerView, Cycle, Rules], bool]
Make = Callable[[ServerView, Cycle, Rules], Command]


class Step(NamedTuple):
    """One step: the command it issues and when it is needed."""

    name: str
    needed: Needed
    command: Make
    doc: str


def _plain(kind: CommandKind) -> Make:
    return lambda _view, _cycle, _rules: Command(kind)


def _to_release(view: ServerView, rules: Rules) -> frozenset[Tag]:
    return rules.release_tags & view.resident


def _is_pushed(view: ServerView, cycle: Cycle) -> bool:
    """The whole model of this cycle is in."""
    content = view.content
    return content.kind is ContentKind.COMPLETE and (content.version, content.cycle) == (
        cycle.version,
        cycle.id,
    )


def _holds(view: ServerView, cycle: Cycle) -> bool:
    """The content is complete, and of the version that the cycle ends with."""
    return view.content.kind is ContentKind.COMPLETE and view.content.version == cycle.version


def _push(view: ServerView, cycle: Cycle, _rules: Rules) -> Command:
    content = view.content
    going_on = content.kind is ContentKind.PARTIAL and content.cycle == cycle.id
    chunk = content.chunks_done if going_on else 0
    return Command(
        CommandKind.PUSH,
        version=cycle.version,
        chunk=chunk,
        chunks=len(cycle.chunk_bytes),
        chunk_bytes=cycle.chunk_bytes[chunk],
    )


ENROL = Step(
    "enrol",
    lambda view, _c, _r: view.state is ServerState.OFFLINE,
    _plain(CommandKind.ENROL),
    "Ask the server who it is.",
)
DRAIN = Step(
    "drain",
    lambda view, _c, _r: view.gate is not Gate.CLOSED,
    _plain(CommandKind.DRAIN),
    "Close the gate, wait for requests in flight.",
)
PAUSE = Step(
    "pause",
    lambda view, _c, _r: not view.paused,
    _plain(CommandKind.PAUSE),
    "Pause generation; what is left is aborted.",
)
FLUSH = Step(
    "flush",
    lambda view, _c, _r: view.kv_epoch is not None and Tag.KV_CACHE in view.resident,
    _plain(CommandKind.FLUSH),
    "Empty the cache, and so prove that the server is idle.",
)
RELEASE = Step(
    "release",
    lambda view, _c, rules: bool(_to_release(view, rules)),
    lambda view, _c, rules: Command(CommandKind.RELEASE, tags=_to_release(view, rules)),
    "Give the policy's memory tags to the trainer.",
)
RESUME_WEIGHTS = Step(
    "resume weights",
    lambda view, _c, _r: Tag.WEIGHTS in view.released,
    lambda _v, _c, _r: Command(CommandKind.RESUME, tags=frozenset({Tag.WEIGHTS})),
    "Take the memory of the weights back.",
)
END_FOREIGN = Step(
    "end stale session",
    lambda view, cycle, _r: view.session not in (0, cycle.id),
    _plain(CommandKind.END),
    "Close a session that an earlier cycle, or somebody else, left open.",
)
BEGIN = Step(
    "begin",
    lambda view, cycle, _r: view.capabilities.sessions and view.session == 0 and not _is_pushed(view, cycle),
    _plain(CommandKind.BEGIN),
    "Open a weight-update session, where the server has them.",
)
PUSH = Step(
    "push",
    lambda view, cycle, _r: not _is_pushed(view, cycle),
    _push,
    "Send the next chunk of weights.",
)
END = Step("end", lambda view, _c, _r: view.session != 0, _plain(CommandKind.END), "Close the session.")
VERIFY = Step(
    "verify",
    lambda view, cycle, _r: _holds(view, cycle) and not view.content.proved,
    lambda _v, cycle, rules: Command(CommandKind.VERIFY, version=cycle.version, level=rules.verify),
    "Read the version back, and the checksum where the policy asks for it.",
)
RESUME_REST = Step(
    "resume the rest",
    lambda view, _c, _r: bool(view.released),
    lambda view, _c, _r: Command(CommandKind.RESUME, tags=view.released),
    "Take back the KV cache and whatever else is out.",
)
REBUILD = Step(
    "confirm the cache empty",
    lambda view, _c, _r: (
        view.state in (ServerState.RELEASED, ServerState.WEIGHTS_STAGED) and view.content.proved
    ),
    _plain(CommandKind.FLUSH),
    "One flush, confirmed: the cache holds nothing of other weights.",
)
CONTINUE = Step(
    "continue",
    lambda view, _c, _r: view.gate is not Gate.OPEN,
    lambda view, _c, _r: Command(CommandKind.CONTINUE, version=view.content.version),
    "Go on with the version that the fleet serves.",
)
FINISH_DRAIN = DRAIN._replace(needed=lambda view, _c, _r: view.gate is Gate.DRAINING)
REBUILD_KEPT = REBUILD._replace(needed=lambda view, _c, _r: view.state is ServerState.WEIGHTS_STAGED)

_STAGE = (DRAIN, PAUSE, FLUSH, RESUME_WEIGHTS, END_FOREIGN, BEGIN, PUSH, END, VERIFY)
_COMMIT = (RESUME_REST, REBUILD)

PROGRAMS: dict[Goal, tuple[Step, ...]] = {
    Goal.ENROL: (ENROL,),
    Goal.RELEASE: (DRAIN, PAUSE, END_FOREIGN, FLUSH, RELEASE),
    Goal.RESUME: (FINISH_DRAIN, RESUME_WEIGHTS, END_FOREIGN, VERIFY, RESUME_REST, REBUILD),
    Goal.REFIT: (*_STAGE, *_COMMIT),
    Goal.STAGE: _STAGE,
    Goal.COMMIT: _COMMIT,
    Goal.FLUSH: (DRAIN, PAUSE, FLUSH),
}
"""For each goal: the steps that lead to the fleet's commit, in order."""

OPEN: tuple[Step, ...] = (CONTINUE,)
"""After the commit. `release` and `stage` have none: the trainer has the memory, or some of it."""

_BACK = (FINISH_DRAIN, REBUILD_KEPT, CONTINUE)
GO_BACK: dict[Goal, tuple[Step, ...]] = {
    Goal.ENROL: (),
    Goal.RELEASE: _BACK,
    Goal.RESUME: _BACK,
    Goal.REFIT: _BACK,
    Goal.STAGE: _BACK,
    Goal.COMMIT: _BACK,
    Goal.FLUSH: _BACK,
}
"""When a cycle aborts: what a server does whose weights were not touched and are all resident.

An enrolment has changed nothing, and a fleet that is none opens no gate.
"""


def can_go_back(view: ServerView, facts: Facts) -> bool:
    """Whether a server still holds the weights that the fleet serves, whole and resident."""
    kept = view.everything_resident and view.content.proved and view.session == 0
    return kept and holds_served(view, facts)


def next_step(steps: Iterable[Step], view: ServerView, cycle: Cycle, rules: Rules) -> Step | None:
    """The first step that is needed, or None: the server waits for the others, or is done."""
    return next((step for step in steps if step.needed(view, cycle, rules)), None)
