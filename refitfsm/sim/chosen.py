"""Faults that a chooser picks, call by call."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from refitfsm.sim.choices import Chooser
from refitfsm.sim.faults import Fault, Kind

DELAYS_S: Final = (0.5, 5.0, 60.0)
"""What `delay` and `slow` are picked from: below, about and above what calls may take."""
REFUSALS: Final = (503, 500, 404)
"""What `status-before` is picked from; `success-false` comes with 200 as well."""
UNKNOWNS: Final = (502, 500, 504)
"""What `status-after` is picked from: a gateway gives up, or an exception is not caught once it was done."""
_ARGUMENTS: Final[dict[Kind, tuple[float, ...]]] = {
    Kind.DELAY: DELAYS_S,
    Kind.SLOW: DELAYS_S,
    Kind.STATUS_BEFORE: REFUSALS,
    Kind.STATUS_AFTER: UNKNOWNS,
    Kind.SUCCESS_FALSE: (200, *REFUSALS),
}


class ChosenFaults:
    """One in `every` calls is befallen by one of `kinds`, if the chooser picks evenly.

    The first question about a call is whether it is befallen: option 1 says so, every other one is calm.
    Of the kinds, the first is the simplest to a shrinker. A call is known by its path and its number among
    those of that path, and no question is asked twice.
    """

    def __init__(
        self,
        chooser: Chooser,
        kinds: Sequence[Kind],
        *,
        every: int,
        name: str = "server",
        paths: Sequence[str] = (),
        tell: Callable[[Fault], None] | None = None,
    ) -> None:
        """`every` is 2 or more. Only calls of `paths` are befallen, if there are any. `tell` hears of faults.

        Raises:
            ValueError: it is not, or there is no kind.
        """
        if every < 2 or not kinds:
            raise ValueError("faults: give a kind, and one in 2 calls or more")
        self._chooser = chooser
        self._kinds = tuple(kinds)
        self._every = every
        self._name = name
        self._paths = tuple(paths)
        self._tell = tell
        self._calls: Counter[str] = Counter()
        self.on = True
        """While False nothing befalls anybody, nothing is asked, and no call is counted."""
        self.struck: Counter[Kind] = Counter()
        """How often each kind befell a call."""

    def draw(self, path: str) -> Fault | None:
        """The fault that befalls this call, if any: one of its path and its number alone."""
        if not self.on or (self._paths and path not in self._paths):
            return None
        self._calls[path] += 1
        number = self._calls[path]
        call = _call(self._name, path, number)
        if self._chooser.choose(f"{call} fault", self._every) != 1:
            return None
        kind = self._kinds[self._chooser.choose(f"{call} kind", len(self._kinds))]
        options = _ARGUMENTS.get(kind, (0.0,))
        argument = options[self._chooser.choose(f"{call} argument", len(options))]
        self.struck[kind] += 1
        fault = Fault(kind, float(argument), path, number, number)
        if self._tell is not None:
            self._tell(fault)
        return fault


def _call(name: str, path: str, number: int) -> str:
    return f"{name} {path}:{number}"


def answers(name: str, faults: Iterable[Fault], kinds: Sequence[Kind]) -> Iterator[tuple[str, int]]:
    """The answers to a `ChosenFaults` of this name and these kinds that give these faults to one call each.

    Raises:
        ValueError: a fault is not of these kinds, not of one call, or has an argument that is never picked.
    """
    for fault in faults:
        options = _ARGUMENTS.get(fault.kind, (0.0,))
        if fault.kind not in kinds or fault.argument not in options or fault.last != fault.first:
            raise ValueError(f"fault {fault.spec}: is none that is picked for one call")
        call = _call(name, fault.path, fault.first)
        yield f"{call} fault", 1
        yield f"{call} kind", list(kinds).index(fault.kind)
        yield f"{call} argument", options.index(fault.argument)
