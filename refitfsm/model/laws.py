"""Laws: what must be true of a fleet's views at every instant, whatever happened before.

Guards keep single steps legal; laws say what the steps must add up to. They are checked after every
step in production (the cheap ones are O(1) per step), on every state that a search reaches, and on
every record of a journal.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from refitfsm.model.fleet import holds_served
from refitfsm.model.states import ALL_TAGS, Condition, ContentKind, Gate, ServerState, Tag
from refitfsm.model.values import CommandKind, Facts, ServerView

ServerLaw = Callable[[ServerView, Facts], bool]


class Law(NamedTuple):
    """A law over one server's view and the facts of its fleet."""

    name: str
    when: ServerLaw
    """Where it says anything: where it is at risk."""
    then: ServerLaw
    says: str

    def holds(self, view: ServerView, facts: Facts) -> bool:
        return not self.when(view, facts) or self.then(view, facts)


def _serves(view: ServerView) -> bool:
    return view.gate is Gate.OPEN or (
        view.pending is not None and view.pending.command.kind is CommandKind.CONTINUE
    )


def _always(_view: ServerView, _facts: Facts) -> bool:
    return True


LAWS: tuple[Law, ...] = (
    Law(
        "only_the_fleets_version_serves",
        lambda view, _f: _serves(view),
        holds_served,
        "A server whose gate is open, or that is told to go on, holds the weights that the fleet serves.",
    ),
    Law(
        "only_proved_content_serves",
        lambda view, _f: _serves(view),
        lambda view, _f: view.content.proved,
        "No server is admitted on the word of a 200: its content was verified since the last write.",
    ),
    Law(
        "no_stale_cache_serves",
        lambda view, _f: _serves(view),
        lambda view, _f: view.kv_epoch is None or view.kv_epoch == view.content.version,
        "The cache of a serving server is empty or made by the weights that serve.",
    ),
    Law(
        "only_resident_servers_serve",
        lambda view, _f: _serves(view) or view.state in (ServerState.SERVING, ServerState.KV_REBUILT),
        lambda view, _f: view.resident == ALL_TAGS,
        "A server that serves, or could, has all of its memory.",
    ),
    Law(
        "an_open_gate_means_serving",
        lambda view, _f: view.gate is not Gate.CLOSED,
        lambda view, _f: view.state is ServerState.SERVING and view.condition is Condition.HEALTHY,
        "Requests are admitted in the state serving and in no other.",
    ),
    Law(
        "a_released_server_is_paused",
        lambda view, _f: bool(view.released),
        lambda view, _f: view.paused,
        "A server of which anything is released is paused: a stranger's probe waits instead of killing it.",
    ),
    Law(
        "a_tag_is_in_one_place",
        _always,
        lambda view, _f: not view.resident & view.released,
        "No tag is believed resident and released at once.",
    ),
    Law(
        "released_weights_are_undefined",
        lambda view, _f: Tag.WEIGHTS in view.released and not view.capabilities.weights_backup,
        lambda view, _f: view.content.kind is ContentKind.UNDEFINED,
        "Weights released without a backup are undefined until a whole push is proved.",
    ),
    Law(
        "no_rebuild_on_unproved_weights",
        lambda view, _f: view.state is ServerState.KV_REBUILT,
        lambda view, _f: view.content.proved,
        "The cache is rebuilt only on proved weights: a failed push never leads to a KV resume.",
    ),
    Law(
        "a_session_keeps_the_server_staged",
        lambda view, _f: view.session != 0,
        lambda view, _f: view.state is ServerState.WEIGHTS_STAGED,
        "While a weight-update session is open the server is in weights_staged.",
    ),
    Law(
        "an_offline_server_holds_nothing",
        lambda view, _f: view.state is ServerState.OFFLINE,
        lambda view, _f: (
            not view.resident and not view.released and view.content.kind is ContentKind.UNDEFINED
        ),
        "Nothing is believed of a process that is gone.",
    ),
    Law(
        "a_suspect_is_left_alone",
        lambda view, _f: view.condition is Condition.SUSPECT,
        lambda view, _f: view.pending is None,
        "Nothing is sent to a server of which it is not known what it did last.",
    ),
    Law(
        "a_rebuilt_cache_is_empty",
        lambda view, _f: view.state is ServerState.KV_REBUILT and view.paused,
        lambda view, _f: view.kv_epoch is None,
        "kv_rebuilt means resident and confirmed clean.",
    ),
)
"""Every law. Each is over one view, so it is checked only where something changed."""


def broken(views: Iterable[ServerView], facts: Facts) -> str | None:
    """The first law that does not hold, as a sentence, or None."""
    for view in views:
        for law in LAWS:
            if not law.holds(view, facts):
                return f"{law.name}: {law.says} Broken by {view}"
    return None
