"""The one source of everything uncertain in a simulation.

Latency, order, faults and jitter are all a call of `Chooser.choose`. A run is therefore its list of
choices: seeded, replayed, enumerated and Hypothesis-drawn runs differ only in the chooser.
"""

import random
from collections.abc import Sequence
from typing import Protocol


class Chooser(Protocol):
    """Picks one of several options. Option 0 is always the calm one: no fault, no delay."""

    def choose(self, label: str, options: int) -> int:
        """A number in `range(options)`; `label` names the question, for traces."""
        ...


class CalmChooser:
    """Always the calm option."""

    def choose(self, label: str, options: int) -> int:  # noqa: ARG002
        return 0


class SeededChooser:
    """Draws from a private generator and remembers what it drew."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation, not a secret
        self.taken: list[tuple[str, int]] = []

    def choose(self, label: str, options: int) -> int:
        picked = self._random.randrange(options) if options > 1 else 0
        self.taken.append((label, picked))
        return picked


class ReplayChooser:
    """Repeats a recorded list of choices, then stays calm."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = list(choices)
        self._next = 0

    def choose(self, label: str, options: int) -> int:  # noqa: ARG002
        if self._next >= len(self._choices):
            return 0
        picked = self._choices[self._next]
        self._next += 1
        return min(picked, options - 1)


STEPS = 1000
"""Resolution of `between`."""


def between(chooser: Chooser, label: str, low: float, high: float) -> float:
    """A number from `low` (the calm choice) to `high`, in `STEPS` steps."""
    if high <= low:
        return low
    return low + (high - low) * chooser.choose(label, STEPS + 1) / STEPS
