"""The one source of everything uncertain in a simulation.

Latency, order, faults and jitter are all a call of `Chooser.choose`. A run is therefore its list of
choices: seeded, replayed, enumerated and Hypothesis-drawn runs differ only in the chooser.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol


class Chooser(Protocol):
    """Picks one of several options. Where one of them is calm (no fault, no delay), it is option 0."""

    def choose(self, label: str, options: int) -> int:
        """A number in `range(options)`; `label` names the question, for traces."""
        ...


class Choice(NamedTuple):
    """One question, and its answer."""

    label: str
    options: int
    picked: int


class CalmChooser:
    """Always option 0."""

    def choose(self, label: str, options: int) -> int:  # noqa: ARG002
        return 0


class SeededChooser:
    """Draws from a private generator, each option as likely as another. Keeps nothing: see `Recorder`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation, not a secret

    def choose(self, label: str, options: int) -> int:  # noqa: ARG002
        return self._random.randrange(options) if options > 1 else 0


class DrawnChooser:
    """Asks a function of the lowest and the highest number, both included.

    With Hypothesis: `DrawnChooser(lambda low, high: data.draw(integers(low, high)))`, which shrinks
    towards calm.
    """

    def __init__(self, draw: Callable[[int, int], int]) -> None:
        self._draw = draw

    def choose(self, label: str, options: int) -> int:  # noqa: ARG002
        return self._draw(0, options - 1) if options > 1 else 0


class Recorder:
    """Asks another chooser, and keeps every question and answer."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self.taken: list[Choice] = []

    def choose(self, label: str, options: int) -> int:
        picked = self._chooser.choose(label, options)
        self.taken.append(Choice(label, options, picked))
        return picked

    def script(self) -> dict[str, int]:
        """What was not calm, by question: its label, and from the second time on ` #` and how often."""
        script, asked = dict[str, int](), Counter[str]()
        for choice in self.taken:
            asked[choice.label] += 1
            if choice.picked:
                script[_key(choice.label, asked[choice.label])] = choice.picked
        return script


class DivergedError(RuntimeError):
    """A replayed run did not ask what the recorded one asked."""


class ReplayChooser:
    """Repeats a recorded run, and fails where the run is another one."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = tuple(choices)
        self._next = 0

    def choose(self, label: str, options: int) -> int:
        """The recorded answer.

        Raises:
            DivergedError: the record has another question here, or none.
        """
        number = self._next
        if number >= len(self._choices):
            raise DivergedError(f"choice {number + 1}: {label!r} is asked, and the record has ended")
        recorded = self._choices[number]
        if (recorded.label, recorded.options) != (label, options):
            raise DivergedError(
                f"choice {number + 1}: {label!r} of {options} is asked,"
                f" and {recorded.label!r} of {recorded.options} was recorded"
            )
        self._next += 1
        return recorded.picked

    def finish(self) -> None:
        """Call this after the run.

        Raises:
            DivergedError: less was asked than is recorded.
        """
        left = len(self._choices) - self._next
        if left:
            raise DivergedError(f"the run has ended, and {left} recorded choices were not asked for")


class ScriptedChooser:
    """Gives the answers of a script to its questions, and stays calm at all others.

    For shrinking: a script of which some is left out is still a run, and what is left in it means the same.
    """

    def __init__(self, script: Mapping[str, int]) -> None:
        """`script` is as `Recorder.script` gives it; a number too high is the highest option there is."""
        self._script = script
        self._asked: Counter[str] = Counter()

    def choose(self, label: str, options: int) -> int:
        self._asked[label] += 1
        return min(self._script.get(_key(label, self._asked[label]), 0), options - 1)


def _key(label: str, number: int) -> str:
    """A question by its label and how often that was asked."""
    return label if number == 1 else f"{label} #{number}"


def every_run(*, runs_max: int | None = None) -> Iterator[Recorder]:
    """A chooser for each run there is, depth first, the calm run first.

    Play one whole run with each before taking the next. The runs must end, and ask the same after the
    same answers.

    Raises:
        DivergedError: a run did not ask again what it asked before.
        ValueError: there are more than `runs_max`.
    """
    prefix: list[Choice] = []
    runs = 0
    while True:
        if runs_max is not None and runs >= runs_max:
            raise ValueError(f"there are more than {runs_max} runs")
        chooser = Recorder(_ThenCalm(prefix))
        yield chooser
        runs += 1
        if len(chooser.taken) < len(prefix):
            raise DivergedError(f"{len(chooser.taken)} choices were asked for, and {len(prefix)} before")
        prefix = list(chooser.taken)
        while prefix and prefix[-1].picked + 1 >= prefix[-1].options:
            prefix.pop()
        if not prefix:
            return
        last = prefix.pop()
        prefix.append(last._replace(picked=last.picked + 1))


class _ThenCalm:
    """Repeats a record strictly, then stays calm."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._replay = ReplayChooser(choices)
        self._left = len(choices)

    def choose(self, label: str, options: int) -> int:
        if not self._left:
            return 0
        self._left -= 1
        return self._replay.choose(label, options)


STEPS = 1000
"""Resolution of `between`."""


def between(chooser: Chooser, label: str, low: float, high: float) -> float:
    """A number from `low` (the calm choice) to `high`, in `STEPS` steps."""
    if high <= low:
        return low
    return low + (high - low) * chooser.choose(label, STEPS + 1) / STEPS
