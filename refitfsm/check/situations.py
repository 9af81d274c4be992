"""Where servers can be, beside each centre, and where a turn of the cycle takes them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from refitfsm.check.codes import Codes
from refitfsm.check.joint import Centre, Flags, Outcome, Question
from refitfsm.model.values import ServerView

Server = tuple[int, int]
"""The numbers of a view and of a truth, as `Numbers` gives them."""
Class = tuple[object, ...]
"""What one server adds to the answer to a question; equal classes are all the same to it."""
ANY: Class = ()
"""An event of one server is the same to others, whatever they are."""


class Place(NamedTuple):
    """Servers of a situation that a turn takes alike."""

    question: str
    flags: Flags
    kind: Class


class Again(NamedTuple):
    """How a turn is asked about once more, with another server in one seat."""

    flags: tuple[Flags, ...]
    views: tuple[ServerView, ...]
    seat: int
    question: Question
    outcome: Outcome


@dataclass(slots=True)
class Arrow:
    """A turn, as it is to the servers of one place."""

    target: "Situation"
    flags: Flags
    codes: Codes
    again: Again
    price: int
    """The fewest faults on the way to it, of all servers together."""
    cost: int
    """1 if the turn is a fault itself."""
    calm: bool
    """It also comes without a fault, where nothing but refits is asked for."""
    images: dict[int, tuple[int, ServerView]]
    """Of the number of a view: the number of the view after, and that view in the codes before."""


@dataclass(slots=True, eq=False)
class Situation:
    """A centre, and how many servers of which flags sit beside it."""

    number: int
    centre_number: int
    centre: Centre
    flags: tuple[Flags, ...]
    servers: dict[Flags, dict[Server, int]] = field(default_factory=dict)
    """What they can be, with the fewest faults on the way there."""
    arrows: dict[Place, dict[tuple[object, ...], Arrow]] = field(default_factory=dict)
    places: dict[Place, list[tuple[Server, int]]] = field(default_factory=dict)
    classes: dict[tuple[str, Flags], dict[Class, tuple[int, int]]] = field(default_factory=dict)
    """The classes that there are, each with its first view and the faults on the way there."""
    is_manned: bool = False
    """There is somebody for each seat."""

    def first_views(self) -> Iterator[int]:
        """Somebody for each seat: the number of a view."""
        for each in self.flags:
            yield next(iter(self.servers[each]))[0]


@dataclass(slots=True, eq=False)
class Turned:
    """How what happens to one server turns the cycle."""

    again: Again
    there: Situation
    view: int
    """The number of that server's view after."""
    price: int | None = None
    """The fewest faults at which the others were taken along; None: they were not yet."""
    calm: bool = False
    """It also happens without a fault."""
