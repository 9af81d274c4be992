"""The search that takes servers apart, as a result for people."""

import time
from typing import NamedTuple

from refitfsm.check import loops
from refitfsm.check.joint import BrokenLaw, Entangled, Planner
from refitfsm.check.modular import Modular
from refitfsm.check.moves import World
from refitfsm.check.search import Seen


class Apart(NamedTuple):
    """What it found."""

    states: int
    """What servers can be, in all situations of the fleet together."""
    steps: int
    calm: int
    """Steps without a fault that were looked at for loops."""
    situations: int
    """What a fleet can be as one."""
    seconds: float
    seen: Seen
    broken: str = ""
    """The law that may be broken: the full search says whether it is, and the way there."""
    entangled: str = ""
    """Why servers cannot be taken apart under this planner."""

    @property
    def good(self) -> bool:
        """Every law holds in all that a fleet can be, and without faults it comes to serve."""
        return not self.broken and not self.entangled


def apart(servers: int, faults: int, world: World) -> Apart:
    """All that each server of a fleet can be, with so many faults of the whole fleet."""
    began = time.perf_counter()
    planner = Planner(world)
    search = Modular(servers, faults, planner)
    broken = entangled = ""
    calm = 0
    try:
        search.run()
        calm = loops.judge(search)
    except BrokenLaw as error:
        broken = str(error)
    except Entangled as error:
        entangled = str(error)
    return Apart(
        search.states,
        search.steps,
        calm,
        len(search.situations),
        time.perf_counter() - began,
        planner.seen,
        broken,
        entangled,
    )
