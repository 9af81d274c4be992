"""Judge how a request was answered: refused by the first rule that does not hold, met already, or taken."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from refitfsm.model.fleet import OF_A_VERSION, Goal, admits, holds_served, holds_staged, usable
from refitfsm.model.records import InputRecord, Turn
from refitfsm.model.rules import FailurePolicy, Rules
from refitfsm.model.states import Condition, ServerState
from refitfsm.model.values import Facts, ServerView

_FLEET = "fleet"
"""Who a refusal is about, if it is about no server."""


class Asked(NamedTuple):
    """A request, and what was so when it came."""

    request: InputRecord
    views: tuple[ServerView, ...]
    """In the order of their names."""
    facts: Facts
    staged: int
    """The last cycle that staged weights, or 0."""
    rules: Rules


def answer(asked: Asked) -> tuple[Turn, str]:
    """The turn that has to follow, and its reason."""
    goal = asked.request.goal
    for culprit, rule in _broken(asked):
        return Turn.REFUSED, f"{goal}: {culprit}: {rule}"
    if _is_met(asked):
        return Turn.ABSORBED, f"{goal}: met already"
    return Turn.OPENED, ""


def _broken(asked: Asked) -> Iterator[tuple[str, str]]:
    """Who breaks which rule, the first rule first."""
    request, views, rules = asked.request, asked.views, asked.rules
    goal = request.goal
    if asked.facts.cycle:
        yield _FLEET, "no_cycle_is_open"
    if goal is Goal.ENROL:
        return
    usables = tuple(filter(usable, views))
    spares = rules.on_failure is FailurePolicy.QUARANTINE
    if not spares:
        yield from _each(views, _is_offline, "servers_are_online")
        yield from _each(views, _is_untrusted, "servers_are_trusted")
    fewest = max(1, rules.floor) if spares else 1
    if len(usables) < fewest:
        yield _FLEET, "enough_servers_remain"
    if goal in OF_A_VERSION and request.version <= asked.facts.serving_version:
        yield _FLEET, "version_is_newer"
    if goal in (Goal.REFIT, Goal.STAGE) and not request.chunk_bytes:
        yield _FLEET, "model_has_chunks"
    if goal is Goal.RESUME:
        yield from _each(usables, lambda view: not holds_served(view, asked.facts), "weights_were_kept")
    if goal is Goal.FLUSH:
        yield from _each(usables, lambda view: not admits(view), "servers_are_serving")
    if goal is Goal.COMMIT:
        lacking = [view for view in usables if not holds_staged(view, asked.staged, request.version)]
        if not asked.staged or (spares and len(usables) - len(lacking) < fewest):
            yield _FLEET, "version_is_staged"
        elif not spares:
            yield from _each(lacking, lambda _view: True, "version_is_staged")


def _each(
    views: Iterable[ServerView], wrong: Callable[[ServerView], bool], rule: str
) -> Iterator[tuple[str, str]]:
    return ((view.server, rule) for view in views if wrong(view))


def _is_offline(view: ServerView) -> bool:
    return view.state is ServerState.OFFLINE


def _is_untrusted(view: ServerView) -> bool:
    return view.condition in (Condition.SUSPECT, Condition.RETIRED)


def _is_met(asked: Asked) -> bool:
    """Whether every server that can be used is there already."""
    usables = filter(usable, asked.views)
    if asked.request.goal is Goal.RELEASE:
        return all(not asked.rules.release_tags & view.resident for view in usables)
    return asked.request.goal is Goal.RESUME and all(map(admits, usables))
