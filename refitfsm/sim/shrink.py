"""Makes a life that breaks a law short: fewer cycles, fewer servers, fewer faults, less chance.

What is left out is tried out, and stays out where the same law is broken without it. So the life that
remains may break it in another way than the one it was made from; it does break it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from refitfsm.errors import ConfigError
from refitfsm.sim.choices import Recorder, ScriptedChooser
from refitfsm.sim.life import play
from refitfsm.sim.played import Played, Settings

PLAYS_MAX: Final = 300
"""Lives that are tried before what there is has to do."""


class Shrunk(NamedTuple):
    """The life that remains."""

    settings: Settings
    script: Mapping[str, int]
    """What is not calm in it, for a `ScriptedChooser`."""
    played: Played
    plays: int
    """Lives that were tried."""


def shrink(settings: Settings, script: Mapping[str, int], law: str, *, plays_max: int = PLAYS_MAX) -> Shrunk:
    """The shortest life found that breaks a law, from a script of one that does.

    Raises:
        ValueError: the life of that script does not break it.
    """
    shrinker = _Shrinker(settings, law, plays_max)
    if not shrinker.breaks(settings, script):
        raise ValueError(f"law {law}: the life of this script does not break it")
    shrinker.fewer_cycles()
    shrinker.fewer_servers()
    shrinker.without(lambda question: not is_of_a_fault(question))
    shrinker.without(lambda question: question.endswith(_FAULT))
    shrinker.on_one_server()
    shrinker.earlier()
    shrinker.fewer_cycles()
    return Shrunk(shrinker.settings, shrinker.script, shrinker.played, shrinker.plays)


_FAULT: Final = " fault"


def is_of_a_fault(question: str) -> bool:
    """Whether a question of a script is one of `ChosenFaults`."""
    return question.endswith((_FAULT, " kind", " argument"))


class _Shrinker:
    """The shortest life so far."""

    settings: Settings
    script: Mapping[str, int]
    played: Played

    def __init__(self, settings: Settings, law: str, plays_max: int) -> None:
        self.settings = settings
        self.plays = 0
        self._law = law
        self._plays_max = plays_max

    def breaks(self, settings: Settings, script: Mapping[str, int]) -> bool:
        """Whether this life breaks the law as well; then it is the shortest so far."""
        if self.plays >= self._plays_max:
            return False
        self.plays += 1
        chooser = Recorder(ScriptedChooser(script))
        try:
            played = play(settings, chooser)
        except ConfigError:  # a floor may want more servers
            return False
        if self._law not in played.laws:
            return False
        self.settings, self.script, self.played = settings, chooser.script(), played
        return True

    def fewer_cycles(self) -> None:
        """As few as will do."""
        fewer = (self.settings._replace(cycles=number) for number in range(1, self.settings.cycles))
        any(self.breaks(settings, self.script) for settings in fewer)

    def fewer_servers(self) -> None:
        """As few as will do."""
        fewer = (self.settings._replace(servers=number) for number in range(1, self.settings.servers))
        any(self.breaks(settings, self.script) for settings in fewer)

    def without(self, matches: Callable[[str], bool]) -> None:
        """Leave out what can be left out of these answers: all, then halves, then one by one."""
        left = [question for question in self.script if matches(question)]
        size = len(left)
        while size:
            at = 0
            while at < len(left):
                out = left[at : at + size]
                if self.breaks(self.settings, _without(self.script, out)):
                    left = [question for question in left if question not in out and question in self.script]
                else:
                    at += size
            size //= 2

    def on_one_server(self) -> None:
        """What befell any of them befalls the only one."""
        for number in range(1, self.settings.servers):
            if self.breaks(self.settings._replace(servers=1), _renamed(self.script, f"s{number}", "s0")):
                return

    def earlier(self) -> None:
        """Each fault befalls the first call of its path that will do."""
        for question in [question for question in self.script if question.endswith(_FAULT)]:
            call = question.removesuffix(_FAULT)
            path, _, number = call.rpartition(":")
            for earlier in range(1, int(number)):
                if self.breaks(self.settings, _renamed(self.script, call, f"{path}:{earlier}")):
                    break


def _renamed(script: Mapping[str, int], before: str, after: str) -> dict[str, int]:
    """Questions about one server, or one call, become those about another."""
    ends = (" ", ".")
    return {
        after + question.removeprefix(before)
        if question.startswith(tuple(before + end for end in ends))
        else question: picked
        for question, picked in script.items()
    }


def _without(script: Mapping[str, int], out: Sequence[str]) -> dict[str, int]:
    """A fault that is left out takes its kind with it: the questions about it are not asked."""
    return {question: picked for question, picked in script.items() if question not in out}
