"""A mistake that a planner makes on purpose, and where it shows."""

from typing import NamedTuple

from refitfsm import policies
from refitfsm.check.changes import Change, Wrap, nothing, planner, unwrapped
from refitfsm.check.hunt import hunt
from refitfsm.check.moves import World
from refitfsm.check.search import Result
from refitfsm.check.worlds import worlds
from refitfsm.model.rules import FailurePolicy
from refitfsm.model.values import VerifyLevel
from refitfsm.planner.playbook import PLAYBOOK

KINDS: tuple[tuple[int, str], ...] = (
    (20, "order"),
    (30, "stale cache"),
    (38, "mixed versions"),
    (53, "memory"),
    (67, "liveness"),
    (81, "crash"),
    (91, "identity"),
    (101, "drift"),
    (117, "silent update"),
    (126, "leak"),
    (134, "numeric"),
)
"""Of the public reports that this project began with: the number of the last of each kind."""
NOT_OF_A_PLANNER = frozenset({"leak"})
"""Kinds that no decision makes: what leaks is what senders lend."""


class Bounds(NamedTuple):
    """The smallest fleet, the fewest faults and the plainest policy that show a mistake."""

    servers: int = 1
    faults: int = 0
    policy: str = "colocated"
    servers_are: str = "no sessions"
    floor: int = 0
    """A failure is spared while so many servers are left; 0: it aborts."""
    verify: VerifyLevel = VerifyLevel.VERSION
    memory_saver: bool = True
    lies: bool = False
    """Pushes may be answered as done that were not."""


class Mistake(NamedTuple):
    """One wrong planner."""

    name: str
    reports: tuple[str, ...]
    """Public reports of the same mistake, by their numbers; the first gives the kind."""
    says: str
    bounds: Bounds = Bounds()
    change: Change = nothing
    """What it goes by instead of what ships."""
    wrap: Wrap = unwrapped
    """What it takes an event for, or makes of its own decision."""

    @property
    def kind(self) -> str:
        number = int(self.reports[0].removeprefix("F"))
        return next(kind for last, kind in KINDS if number <= last)


def sound_world(bounds: Bounds) -> World:
    """The planner that ships, within the bounds of a mistake.

    Raises:
        ConfigError: there is no such policy.
        StopIteration: there are no such servers under it.
    """
    rules = policies.load(bounds.policy).rules._replace(verify=bounds.verify)
    if bounds.floor:
        rules = rules._replace(on_failure=FailurePolicy.QUARANTINE, floor=bounds.floor)
    world = next(each.world for each in worlds(rules) if each.name == bounds.servers_are)
    return world._replace(able=world.able._replace(memory_saver=bounds.memory_saver))


def wrong_world(mistake: Mistake) -> World:
    """The same with the planner that makes it."""
    plays = mistake.change(PLAYBOOK)
    return sound_world(mistake.bounds)._replace(decide=mistake.wrap(planner(plays)), book=plays.book)


def look(mistake: Mistake) -> Result:
    """Search for the mistake within its bounds. `Result.broken` is None if it is not found."""
    bounds = mistake.bounds
    return hunt(bounds.servers, bounds.faults, wrong_world(mistake), lies=bounds.lies)


def look_at_the_sound(bounds: Bounds, *, states_max: int) -> Result:
    """The same search of the planner that ships."""
    return hunt(bounds.servers, bounds.faults, sound_world(bounds), lies=bounds.lies, states_max=states_max)
