"""What may be asked of a fleet, and when: the guards of each goal, as data."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from refitfsm.model.fleet import FleetView, Goal, admits, holds_served, holds_staged, usable
from refitfsm.model.rules import FailurePolicy, Rules
from refitfsm.model.states import Condition, ServerState
from refitfsm.model.values import ServerView


class Request(NamedTuple):
    """Somebody asks for a goal."""

    goal: Goal
    version: int = 0
    """refit, stage, commit: the new version."""
    chunk_bytes: tuple[int, ...] = ()
    """refit, stage: bytes of each chunk."""


class Refusal(NamedTuple):
    """Why a request is not taken."""

    server: str
    """The server it is about, or `fleet`."""
    state: str
    rule: str
    remedy: str


class FleetGuard(NamedTuple):
    """A named predicate over the fleet: returns who breaks it, or None when it holds."""

    name: str
    broken_by: Callable[[FleetView, Request, Rules], ServerView | str | None]
    remedy: str


def _first(fleet: FleetView, wrong: Callable[[ServerView], bool]) -> ServerView | None:
    return next((view for view in fleet.servers.values() if wrong(view)), None)


def _spared(rules: Rules) -> bool:
    return rules.on_failure is FailurePolicy.QUARANTINE


def _too_few(fleet: FleetView, _request: Request, rules: Rules) -> str | None:
    count = sum(map(usable, fleet.servers.values()))
    floor = max(1, rules.floor) if _spared(rules) else 1
    return None if count >= floor else f"{count} of {len(fleet.servers)} servers usable"


def _not_staged(fleet: FleetView, request: Request, rules: Rules) -> ServerView | str | None:
    """A server without the weights that were staged; with quarantine, the floor of those that have them."""
    if not fleet.staged:
        return "nothing is staged"

    def holds(view: ServerView) -> bool:
        return holds_staged(view, fleet.staged, request.version)

    if not _spared(rules):
        return _first(fleet, lambda view: usable(view) and not holds(view))
    count = sum(map(holds, fleet.servers.values()))
    return None if count >= max(1, rules.floor) else f"{count} servers hold version {request.version}"


NO_CYCLE_IS_OPEN = FleetGuard(
    "no_cycle_is_open",
    lambda fleet, _q, _r: f"cycle {fleet.cycle.id} ({fleet.cycle.goal}) is open" if fleet.cycle else None,
    "wait for it to end: one cycle at a time",
)
SERVERS_ARE_ONLINE = FleetGuard(
    "servers_are_online",
    lambda fleet, _q, rules: (
        None if _spared(rules) else _first(fleet, lambda view: view.state is ServerState.OFFLINE)
    ),
    "start the server and connect again, or use on_failure = quarantine",
)
SERVERS_ARE_TRUSTED = FleetGuard(
    "servers_are_trusted",
    lambda fleet, _q, rules: (
        None
        if _spared(rules)
        else _first(fleet, lambda view: view.condition in (Condition.SUSPECT, Condition.RETIRED))
    ),
    "what its last command did is not known: restart the server and connect again",
)
ENOUGH_SERVERS_REMAIN = FleetGuard(
    "enough_servers_remain", _too_few, "restart servers until the policy's floor is met"
)
VERSION_IS_NEWER = FleetGuard(
    "version_is_newer",
    lambda fleet, request, _r: (
        None if request.version > fleet.serving_version else f"version {fleet.serving_version} is served"
    ),
    "give a higher version",
)
MODEL_HAS_CHUNKS = FleetGuard(
    "model_has_chunks",
    lambda _f, request, _r: None if request.chunk_bytes else "no weights were given",
    "give at least one tensor",
)
WEIGHTS_WERE_KEPT = FleetGuard(
    "weights_were_kept",
    lambda fleet, _q, _r: _first(fleet, lambda view: usable(view) and not holds_served(view, fleet.facts)),
    "their weights are not what the fleet serves: refit, with a higher version",
)

VERSION_IS_STAGED = FleetGuard(
    "version_is_staged",
    _not_staged,
    "stage this version first, or refit",
)
_USABLE = (NO_CYCLE_IS_OPEN, SERVERS_ARE_ONLINE, SERVERS_ARE_TRUSTED, ENOUGH_SERVERS_REMAIN)

GOAL_GUARDS: dict[Goal, tuple[FleetGuard, ...]] = {
    Goal.ENROL: (NO_CYCLE_IS_OPEN,),
    Goal.RELEASE: _USABLE,
    Goal.RESUME: (*_USABLE, WEIGHTS_WERE_KEPT),
    Goal.REFIT: (*_USABLE, VERSION_IS_NEWER, MODEL_HAS_CHUNKS),
    Goal.STAGE: (*_USABLE, VERSION_IS_NEWER, MODEL_HAS_CHUNKS),
    Goal.COMMIT: (*_USABLE, VERSION_IS_NEWER, VERSION_IS_STAGED),
    Goal.FLUSH: (
        *_USABLE,
        FleetGuard(
            "servers_are_serving",
            lambda fleet, _q, _r: _first(fleet, lambda view: usable(view) and not admits(view)),
            "resume or refit the fleet first; a refit leaves the cache empty by itself",
        ),
    ),
}
"""For each goal: what must hold of the fleet before anything is sent."""


def refusal(
    fleet: FleetView,
    request: Request,
    rules: Rules,
    goals: Mapping[Goal, tuple[FleetGuard, ...]] = GOAL_GUARDS,
) -> Refusal | None:
    """The first guard of the goal that does not hold, or None."""
    for guard in goals[request.goal]:
        culprit = guard.broken_by(fleet, request, rules)
        if isinstance(culprit, ServerView):
            why = f" ({culprit.reason})" if culprit.reason else ""
            offline = culprit.state is ServerState.OFFLINE
            state = f"{culprit.state}{'' if offline else f', {culprit.condition}'}{why}"
            return Refusal(culprit.server, state, guard.name, guard.remedy)
        if culprit is not None:
            return Refusal("fleet", culprit, guard.name, guard.remedy)
    return None


def is_met(fleet: FleetView, request: Request, rules: Rules) -> bool:
    """Whether nothing needs to be done for the goal."""
    views = [view for view in fleet.servers.values() if usable(view)]
    if request.goal is Goal.RELEASE:
        return all(not rules.release_tags & view.resident for view in views)
    if request.goal is Goal.RESUME:
        return all(map(admits, views))
    return False
