"""All that the planner goes by, as one value: the table's book, what a goal asks for, and what it does.

Nothing else decides. So whoever wants to know what a rule is good for can leave it out, and look.
"""

from collections.abc import Mapping
from typing import NamedTuple

from refitfsm.model.fleet import Goal
from refitfsm.model.table import BOOK, Book
from refitfsm.planner.program import GO_BACK, OPEN, PROGRAMS, Step
from refitfsm.planner.requests import GOAL_GUARDS, FleetGuard


class Playbook(NamedTuple):
    """Rules of servers, guards of goals, and the steps in their order."""

    book: Book
    goals: Mapping[Goal, tuple[FleetGuard, ...]]
    programs: Mapping[Goal, tuple[Step, ...]]
    """Until the commit."""
    opening: tuple[Step, ...]
    """After it."""
    going_back: Mapping[Goal, tuple[Step, ...]]
    """When a cycle aborts."""


PLAYBOOK = Playbook(BOOK, GOAL_GUARDS, PROGRAMS, OPEN, GO_BACK)
"""What ships."""
