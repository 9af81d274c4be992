"""The search that takes servers apart, as a result for people."""

import time
from typing import NamedTuple

from refitfsm.check.joint import BrokenLaw, Entangled, Planner
from refitfsm.check.modular import Modular
from refitfsm.check.moves import World


class Apart(NamedTuple):
    """What it found."""

    states: int
    """What servers can be, in all situations of the fleet together."""
    steps: int
    situations: int
    """What a fleet can be as one."""
    seconds: float
    rows: tuple[str, ...]
    """The rows of the table that were taken."""
    broken: str = ""
    """The law that may be broken: the full search says whether it is, and the way there."""
    entangled: str = ""
    """Why servers cannot be taken apart under this planner."""

    @property
    def good(self) -> bool:
        """Every law of safety holds in all that a fleet can be."""
        return not self.broken and not self.entangled


def apart(servers: int, faults: int, world: World) -> Apart:
    """All that each server of a fleet can be, with so many faults of the whole fleet."""
    began = time.perf_counter()
    planner = Planner(world)
    search = Modular(servers, faults, planner)
    broken = entangled = ""
    try:
        search.run()
    except BrokenLaw as error:
        broken = str(error)
    except Entangled as error:
        entangled = str(error)
    return Apart(
        search.states,
        search.steps,
        len(search.situations),
        time.perf_counter() - began,
        tuple(sorted(planner.seen.rows)),
        broken,
        entangled,
    )
