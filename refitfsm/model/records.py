"""What is written down: one record for every judged event and every turn of a cycle.

Records are the planner's output. The journal stores them before anything is done about them, after what
the planner was given: so a journal says what was decided, and lets it be decided again.
"""

from enum import StrEnum
from typing import NamedTuple

from refitfsm.model.fleet import Cycle, Goal
from refitfsm.model.table import Verdict
from refitfsm.model.values import Command, Event, Facts, ServerView


class ServerRecord(NamedTuple):
    """An event was judged on a server."""

    server: str
    event: Event
    facts: Facts
    verdict: Verdict
    row: str
    """The id of the row taken, or of the one that came closest to a refused event."""
    guards: tuple[tuple[str, bool], ...]
    rule: str
    before: ServerView
    after: ServerView


class Turn(StrEnum):
    """What happened to the fleet's cycle."""

    OPENED = "opened"
    REFUSED = "refused"
    ABSORBED = "absorbed"
    """The goal was met already: nothing was sent."""
    DROPPED = "dropped"
    """A server dropped out; the cycle goes on without it."""
    ABORTING = "aborting"
    COMMITTED = "committed"
    """The fleet's version moves here and nowhere else."""
    CLOSED = "closed"


class FleetRecord(NamedTuple):
    """A cycle turned."""

    turn: Turn
    cycle: Cycle | None
    """After the turn; `closed`: as it ended."""
    serving_before: int
    serving_after: int
    reason: str = ""


Record = ServerRecord | FleetRecord


class InputKind(StrEnum):
    """What a planner can be given, beside a server's event."""

    REQUEST = "request"
    """Somebody asks for a goal."""
    TICK = "tick"
    """A time is up."""
    ABANDON = "abandon"
    """Whoever asked for the open cycle does not want it any more."""


class InputRecord(NamedTuple):
    """What a step was given. A server's event has none: it stands in the step's first record."""

    given: InputKind
    goal: Goal | None = None
    """request"""
    version: int = 0
    """request: refit, stage, commit: the new version."""
    chunk_bytes: tuple[int, ...] = ()
    """request: refit, stage: bytes of each chunk."""
    reason: str = ""
    """abandon"""


Written = InputRecord | Record
"""What a journal stores."""


class Issued(NamedTuple):
    """A command to be carried out, after its record is in the journal."""

    server: str
    cycle: int
    seq: int
    command: Command
    deadline_s: float
