"""The scenarios of this repository, each played once in a test process."""

from functools import cache
from pathlib import Path

from refitfsm.sim.scenario import files, load
from refitfsm.sim.scenario_play import Told, tell

FOLDER = Path(__file__).parents[2] / "simulations"
FILES = files(FOLDER)
GROUP = "scenarios"
"""Tests of this group share what was played."""


@cache
def told(path: Path) -> Told:
    """How a scenario went."""
    return tell(load(path))
