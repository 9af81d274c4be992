"""What a check is, and the list of all of them."""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple

from refitfsm.model.values import Capabilities
from refitfsm.sim.conformance.subject import Subject

Version = tuple[int, ...]
Run = Callable[[Subject], Awaitable[None]]


class Area(StrEnum):
    """What a check is about."""

    DRIVER = "driver"
    BODIES = "bodies"
    ASKING = "asking"
    GENERATION = "generation"
    PAUSING = "pausing"
    WEIGHTS = "weights"
    MEMORY = "memory"
    DEATH = "death"


class Need(StrEnum):
    """What a server must have been started with."""

    SAVER = "memory saver"
    NO_SAVER = "no memory saver"


class Check(NamedTuple):
    """One law. A harmless one finds a server that serves, and leaves it so; a lethal one leaves it dead."""

    name: str
    law: str
    area: Area
    run: Run
    lethal: bool
    slow: bool
    """Takes 20 s or more on a real server."""
    since: Version
    """The first release it holds for."""
    before: Version
    """The first release it does not hold for any more."""
    needs: Need | None

    def skipped_for(self, found: Capabilities) -> str:
        """Why it does not apply to a server; empty if it does."""
        version = version_of(found)
        if version < self.since:
            return f"holds from {_shown(self.since)} on"
        if version >= self.before:
            return f"holds before {_shown(self.before)}"
        if self.needs is Need.SAVER and not found.memory_saver:
            return "needs the memory saver"
        if self.needs is Need.NO_SAVER and found.memory_saver:
            return "needs a server without the memory saver"
        return ""


def version_of(found: Capabilities) -> Version:
    """`0.5.12.post1` is (0, 5, 12)."""
    return tuple(int(part) for part in found.sglang_version.split(".")[:3])


def _shown(version: Version) -> str:
    return ".".join(map(str, version))


FOREVER: Version = (99,)
CHECKS: list[Check] = []
"""All of them, in the order in which their modules were imported; see `catalogue`."""


def check(
    area: Area,
    *,
    lethal: bool = False,
    slow: bool = False,
    since: Version = (),
    before: Version = FOREVER,
    needs: Need | None = None,
) -> Callable[[Run], Run]:
    """Put a function on the list: its name is the check's, its docstring's first line the law."""

    def put(run: Run) -> Run:
        name = getattr(run, "__name__", "")
        law = (run.__doc__ or "").partition("\n")[0]
        CHECKS.append(Check(name, law, area, run, lethal, slow, since, before, needs))
        return run

    return put
