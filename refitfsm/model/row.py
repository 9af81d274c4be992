"""A row of the transition table, and how rows are written."""

from enum import StrEnum
from typing import NamedTuple

from refitfsm.model.states import ServerState
from refitfsm.model.values import EventName

OFFLINE, RELEASED, STAGED, REBUILT, SERVING = (
    ServerState.OFFLINE,
    ServerState.RELEASED,
    ServerState.WEIGHTS_STAGED,
    ServerState.KV_REBUILT,
    ServerState.SERVING,
)
ONLINE = (SERVING, RELEASED, STAGED, REBUILT)
PAUSABLE = (SERVING, STAGED, REBUILT)
EVERYWHERE = tuple(ServerState)


class Verdict(StrEnum):
    """What a row says of an event."""

    TAKE = "take"
    """The effects apply, and the state moves where the row says."""
    REFUSE = "refuse"
    """Nothing changes, nothing is sent, and whoever asked is told the rule and the remedy."""
    IGNORE = "ignore"
    """Nothing changes; recorded."""


class Row(NamedTuple):
    """One rule. `destination` None keeps the state."""

    source: ServerState
    event: EventName
    verdict: Verdict
    guards: tuple[str, ...]
    destination: ServerState | None
    effects: tuple[str, ...]
    doc: str
    rule: str = ""
    """refuse: the rule in the form of a guard's name."""
    remedy: str = ""
    """refuse: what to do instead."""
    id: str = ""
    """`SOURCE/EVENT/PLACE IN THE CELL`; given by the table."""


Sources = ServerState | tuple[ServerState, ...]


def _each(sources: Sources) -> tuple[ServerState, ...]:
    return (sources,) if isinstance(sources, ServerState) else sources


def take(  # noqa: PLR0917 - a rule reads as a line
    sources: Sources,
    event: EventName,
    guards: tuple[str, ...],
    effects: tuple[str, ...],
    doc: str,
    to: ServerState | None = None,
) -> tuple[Row, ...]:
    """The event is taken in these states if all guards hold."""
    return tuple(Row(source, event, Verdict.TAKE, guards, to, effects, doc) for source in _each(sources))


def refuse(sources: Sources, event: EventName, rule: str, remedy: str) -> tuple[Row, ...]:
    """The event is never legal in these states."""
    return tuple(
        Row(source, event, Verdict.REFUSE, (), None, (), remedy, rule, remedy) for source in _each(sources)
    )


def ignore(sources: Sources, event: EventName, doc: str) -> tuple[Row, ...]:
    """The event means nothing in these states."""
    return tuple(Row(source, event, Verdict.IGNORE, (), None, (), doc) for source in _each(sources))
