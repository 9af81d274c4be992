"""Faults that a chooser picks, call by call."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from refitfsm.sim.choices import Chooser
from refitfsm.sim.faults import Fault, Kind

DELAYS_S: Final = (0.5, 5.0, 60.0)
"""What `delay` and `slow` are picked from: below, about and above what calls may take."""
REFUSALS: Final = (503, 500, 404)
"""What `status-before` is picked from; `success-false` comes with 200 as well."""
UNKNOWNS: Final = (502, 500, 504)
"""What `status-after` is picked from: a gateway gives up, or an exception is not caught once it was done."""


class ChosenFaults:
    """One in `every` calls is befallen by one of `kinds`, if the chooser picks evenly.

    The first question about a call is whether it is befallen: option 1 says so, every other one is calm.
    Of the kinds, the first is the simplest to a shrinker.
    """

    def __init__(self, chooser: Chooser, kinds: Sequence[Kind], *, every: int, name: str = "server") -> None:
        """`every` is 2 or more.

        Raises:
            ValueError: it is not, or there is no kind.
        """
        if every < 2 or not kinds:
            raise ValueError("faults: give a kind, and one in 2 calls or more")
        self._chooser = chooser
        self._kinds = tuple(kinds)
        self._every = every
        self._name = name
        self.on = True
        """While False nothing befalls anybody, and nothing is asked."""
        self.struck: Counter[Kind] = Counter()
        """How often each kind befell a call."""

    def draw(self, path: str) -> Fault | None:
        """The fault that befalls this call, if any."""
        if not self.on or self._chooser.choose(f"{self._name} {path}: fault", self._every) != 1:
            return None
        kind = self._kinds[self._chooser.choose(f"{self._name} {path}: kind", len(self._kinds))]
        self.struck[kind] += 1
        return Fault(kind, self._argument(kind), path, 1, None)

    def _argument(self, kind: Kind) -> float:
        match kind:
            case Kind.DELAY | Kind.SLOW:
                return DELAYS_S[self._chooser.choose("seconds", len(DELAYS_S))]
            case Kind.STATUS_BEFORE:
                return REFUSALS[self._chooser.choose("status", len(REFUSALS))]
            case Kind.STATUS_AFTER:
                return UNKNOWNS[self._chooser.choose("status", len(UNKNOWNS))]
            case Kind.SUCCESS_FALSE:
                return (200, *REFUSALS)[self._chooser.choose("status", len(REFUSALS) + 1)]
        return 0.0
