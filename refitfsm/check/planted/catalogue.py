"""All mistakes, and the one that stands for them in a run."""

import random

from refitfsm.check.planted.mistake import Mistake
from refitfsm.check.planted.with_fleets import FLEETS
from refitfsm.check.planted.with_servers import SERVERS

MISTAKES: tuple[Mistake, ...] = (*SERVERS, *FLEETS)
"""Each is found within its bounds."""


def canary(seed: str) -> Mistake:
    """One of them, by any text: a commit, a date. The same text gives the same one."""
    return random.Random(seed).choice(MISTAKES)  # noqa: S311 - nothing to keep secret
