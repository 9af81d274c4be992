"""What a simulated life is played with, and how it went."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from refitfsm import policies
from refitfsm.controller import Controller
from refitfsm.sim.faults import Fault, Kind

COMMITTED, ABORTED, REFUSED = "committed", "aborted", "refused"
AS_IT_WAS, AFTER_RESTART = "as it was", "after a restart"


class Settings(NamedTuple):
    """What is simulated."""

    policy: policies.NamedPolicy
    servers: int
    cycles: int
    kinds: Sequence[Kind]
    """Faults there may be; empty: none."""
    every: int
    """One in so many calls is befallen; 2 or more."""
    sglang_version: str = "0.5.23"
    paths: Sequence[str] = ()
    """Calls that may be befallen; empty: all."""
    controls: Callable[..., Controller] = Controller
    """The controller, with the planner that ships or another."""


class Played(NamedTuple):
    """How a life went. It is good when `broken` is empty."""

    broken: tuple[str, ...]
    """Laws that were broken: the law's name, then where and how."""
    cycles: Counter[str]
    """Refits that were asked for, by their end: committed, aborted, refused."""
    faults: Counter[str]
    """Calls that a fault befell, by kind."""
    at_risk: Counter[str]
    """How often each law was looked at where it could have been broken."""
    restarts: int
    """How often the whole fleet was restarted, because an error said that a server must be."""
    healed: str
    """How the last refit got through: `AS_IT_WAS`, no server was ever restarted, or `AFTER_RESTART`.
    Empty: it did not."""
    answers: int
    records: int
    """In all journals."""
    journal_digest: str
    """Equal for two lives when all lines of all their journals are."""
    virtual_s: float
    script: tuple[str, ...]
    """What happened, in order, as lines: when, and what was asked, befell or was said."""
    befallen: tuple[tuple[str, Fault], ...]
    """Each fault that came, with its server."""

    @property
    def laws(self) -> tuple[str, ...]:
        """The names of the laws that were broken, the first one first."""
        return tuple(broken.partition(":")[0] for broken in self.broken)
