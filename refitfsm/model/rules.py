"""What a policy file says, as the planner reads it."""

from enum import StrEnum
from typing import NamedTuple

from refitfsm.model.states import Tag
from refitfsm.model.values import CommandKind, VerifyLevel


class FailurePolicy(StrEnum):
    """What happens to a cycle when a server fails in it."""

    ABORT = "abort"
    """Servers whose weights were not touched go back to serving the old version; nobody commits."""
    HOLD = "hold"
    """Nobody opens: every server stays where it is until the next cycle."""
    QUARANTINE = "quarantine"
    """The others commit without it, if they are at least the floor."""


class Rules(NamedTuple):
    """A policy, validated. Times in seconds, sizes in bytes."""

    name: str
    release_tags: frozenset[Tag]
    """What `release` gives to the trainer; empty: servers are always resident."""
    on_failure: FailurePolicy
    floor: int
    """quarantine: the fewest servers that may commit."""
    verify: VerifyLevel
    attempts: int
    """How often a command is tried whose answer was lost and that may be repeated."""
    needs_loader: bool
    """Weights are copied by the servers' own loader, `refitfsm.server.loader`."""
    deadlines_s: tuple[tuple[CommandKind, float], ...]
    """For every kind of command: when it counts as lost."""
    push_bytes_per_s: float
    """Added to the push's deadline: bytes of the chunk over this."""
    cycle_s: float
    """After this a cycle takes no further step toward its goal."""
    grace_s: float
    """After this much more, whatever is in flight counts as lost and the cycle is closed."""

    def deadline_s(self, kind: CommandKind) -> float:
        return dict(self.deadlines_s)[kind]
