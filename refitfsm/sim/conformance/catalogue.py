"""All checks, in the order in which they are run: harmless ones first."""

from typing import Final

from refitfsm.sim.conformance import (
    asking,
    bodies,
    contract,
    generation,
    lethal,
    memory,
    pausing,
    updating,
)
from refitfsm.sim.conformance.registry import CHECKS, Check

MODULES: Final = (contract, bodies, asking, generation, pausing, updating, memory, lethal)
"""The modules whose import put the checks on the list."""

EVERY: Final[tuple[Check, ...]] = tuple(sorted(CHECKS, key=lambda check: check.lethal))
HARMLESS: Final = tuple(check for check in EVERY if not check.lethal)
LETHAL: Final = tuple(check for check in EVERY if check.lethal)
