"""The fleet as a value: its servers' views, the version it serves, and the one cycle that is open."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from refitfsm.model.states import Condition, ContentKind, Gate, ServerState
from refitfsm.model.values import Facts, ServerView


class Goal(StrEnum):
    """What a cycle is to reach."""

    ENROL = "enrol"
    """Every server read, and serving."""
    RELEASE = "release"
    """The policy's memory tags given to the trainer."""
    RESUME = "resume"
    """Serving again with the weights that were kept."""
    REFIT = "refit"
    """Serving a new version."""
    STAGE = "stage"
    """Holding a new version, and not serving it yet: what else was released stays with the trainer."""
    COMMIT = "commit"
    """Serving the version that was staged."""
    FLUSH = "flush"
    """Serving with an empty cache."""


WITHOUT_COMMIT = frozenset({Goal.RELEASE, Goal.STAGE})
"""Goals that are reached when every server is there; the version that is served stays."""
OF_A_VERSION = frozenset({Goal.REFIT, Goal.STAGE, Goal.COMMIT})
"""Goals with a version of their own; the others keep the one that is served."""


class Phase(StrEnum):
    """How far a cycle got."""

    WORKING = "working"
    """On its way to its goal."""
    COMMITTED = "committed"
    """All that count are ready; they are told to go on."""
    ABORTING = "aborting"
    """It will not reach its goal; what can go back goes back."""


class Cycle(NamedTuple):
    """One attempt of the whole fleet to reach a goal."""

    id: int
    goal: Goal
    members: frozenset[str]
    version: int
    """refit, stage, commit: the new version; otherwise the version that is served."""
    chunk_bytes: tuple[int, ...] = ()
    """refit, stage: bytes of each chunk that makes the model."""
    started_s: float = 0.0
    deadline_s: float = 0.0
    """After this it takes no further step toward its goal."""
    closes_s: float = 0.0
    """After this nothing is issued and whatever is in flight counts as lost."""
    phase: Phase = Phase.WORKING
    failed: tuple[tuple[str, str], ...] = ()
    """Servers that dropped out, with the reason."""
    reason: str = ""
    """Why it aborts."""
    given_up: frozenset[str] = frozenset()
    """Servers that failed again after the commit or on the way back."""
    busy: int = 0
    """Members with a command in flight."""

    @property
    def failed_servers(self) -> frozenset[str]:
        return frozenset(server for server, _ in self.failed)


class FleetView(NamedTuple):
    """Everything the planner decides on."""

    servers: Mapping[str, ServerView]
    """By name, in the order of the names; never changed in place."""
    serving_version: int = 0
    cycle: Cycle | None = None
    last_cycle: int = 0
    staged: int = 0
    """The last cycle that staged weights, or 0. A server holds them while its content is of that cycle."""
    serving_push: int = 0
    """The cycle that pushed the weights that the fleet serves; 0: it serves what servers start with."""

    @classmethod
    def of(cls, names: Iterable[str]) -> "FleetView":
        """A fleet of servers of which nothing is known yet."""
        return cls({name: ServerView(name) for name in sorted(names)})

    @property
    def facts(self) -> Facts:
        return Facts(self.serving_version, self.cycle.id if self.cycle else 0, self.serving_push)


def holds_served(view: ServerView, facts: Facts) -> bool:
    """Whether a server's weights, whole, are those that its fleet serves: of that version and that push."""
    content = view.content
    served = (facts.serving_version, facts.serving_push)
    return content.kind is ContentKind.COMPLETE and (content.version, content.cycle) == served


def holds_staged(view: ServerView, cycle: int, version: int) -> bool:
    """Whether a server that can be used holds the weights that a cycle staged, whole and proved."""
    content = view.content
    whole = content.proved and (content.version, content.cycle) == (version, cycle)
    return usable(view) and view.condition is Condition.HEALTHY and whole and view.session == 0


def admits(view: ServerView) -> bool:
    """May a request be routed to this server now."""
    return (
        view.state is ServerState.SERVING and view.gate is Gate.OPEN and view.condition is Condition.HEALTHY
    )


def usable(view: ServerView) -> bool:
    """Can a cycle do anything with this server."""
    return view.state is not ServerState.OFFLINE and view.condition not in (
        Condition.SUSPECT,
        Condition.RETIRED,
    )
