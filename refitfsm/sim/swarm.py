"""Many lives: each seed draws which faults there may be and how often, then plays one life.

A life in which everything may happen at once shows little: one fault hides another. So each seed leaves
some kinds out, and some seeds have many faults and others few.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from refitfsm import policies
from refitfsm.sim.choices import Chooser, Recorder, SeededChooser
from refitfsm.sim.faults import Kind
from refitfsm.sim.judged import LAWS
from refitfsm.sim.life import play
from refitfsm.sim.planted import controls_of
from refitfsm.sim.played import Played, Settings
from refitfsm.sim.shrink import Shrunk, shrink

UNSEEN: Final = frozenset({Kind.LIE, Kind.CORRUPT})
"""Faults that SGLang's answers do not show: servers that say they did what they did not."""
SEEN: Final = tuple(kind for kind in Kind if kind not in UNSEEN)
RATES: Final = (500, 200, 100, 50, 20, 10)
"""One in so many calls is befallen: what a seed draws from, the calmest first."""


NARROW_RATES: Final = (20, 10, 5, 2)
"""The same for a life in which only one kind of call may be befallen."""
PATHS: Final = (
    "/pause_generation",
    "/flush_cache",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/model_info",
    "/continue_generation",
    "/generate",
)
"""Calls that a cycle makes."""


class Lives(NamedTuple):
    """What all lives have in common."""

    policy: policies.NamedPolicy
    servers: int
    cycles: int
    kinds: Sequence[Kind] = ()
    """The faults of every life; empty: each draws its own from `SEEN`."""
    every: int = 0
    """One in so many calls is befallen; 0: each life draws it."""
    sglang_version: str = "0.5.23"
    planted: str = ""
    """The planner that is wrong on purpose; empty: the one that ships."""


class Life(NamedTuple):
    """One seed, what it drew and how it went."""

    seed: int
    settings: Settings
    played: Played


class Total(NamedTuple):
    """What many lives add up to."""

    lives: int
    broken: int
    """Lives in which a law was broken."""
    cycles: Counter[str]
    faults: Counter[str]
    at_risk: Counter[str]
    healed: Counter[str]
    """Lives by how they healed."""
    restarts: int
    answers: int
    records: int
    virtual_s: float
    journal_digest: str
    """Equal when all lines of all journals of all lives are."""

    @property
    def never_at_risk(self) -> tuple[str, ...]:
        """Laws that nothing could have broken: they were not tested."""
        return tuple(law for law in LAWS if not self.at_risk[law])


def drawn(lives: Lives, chooser: Chooser) -> Settings:
    """The settings of one life."""
    kinds = lives.kinds or [kind for kind in SEEN if chooser.choose(f"may there be {kind}", 2)]
    narrow = bool(chooser.choose("at one call alone", 2))
    rates = NARROW_RATES if narrow else RATES
    every = lives.every or rates[chooser.choose("how often", len(rates))]
    paths = (PATHS[chooser.choose("which call", len(PATHS))],) if narrow else ()
    return Settings(
        lives.policy,
        lives.servers,
        lives.cycles,
        tuple(kinds),
        every,
        lives.sglang_version,
        paths,
        controls_of(lives.planted),
    )


def play_seeds(lives: Lives, seeds: Sequence[int]) -> Iterator[Life]:
    """One life for each seed; the same seed plays the same life, in any process.

    Raises:
        ConfigError: the release is not simulated, or the policy does not fit the servers.
    """
    for seed in seeds:
        chooser = SeededChooser(seed)
        settings = drawn(lives, chooser)
        yield Life(seed, settings, play(settings, chooser))


def shortest(lives: Lives, seed: int, law: str) -> Shrunk:
    """The shortest life that breaks a law, found from the one of a seed that does."""
    chooser = SeededChooser(seed)
    settings = drawn(lives, chooser)
    recorder = Recorder(chooser)
    play(settings, recorder)
    return shrink(settings, recorder.script(), law)


def total(lives: Sequence[Life]) -> Total:
    """What they add up to."""
    played = [life.played for life in lives]
    cycles, faults, at_risk = Counter[str](), Counter[str](), Counter[str]()
    digest = hashlib.sha256()
    for each in played:
        cycles.update(each.cycles)
        faults.update(each.faults)
        at_risk.update(each.at_risk)
        digest.update(each.journal_digest.encode())
    return Total(
        lives=len(played),
        broken=sum(bool(each.broken) for each in played),
        cycles=cycles,
        faults=faults,
        at_risk=at_risk,
        healed=Counter(each.healed for each in played if each.healed),
        restarts=sum(each.restarts for each in played),
        answers=sum(each.answers for each in played),
        records=sum(each.records for each in played),
        virtual_s=sum(each.virtual_s for each in played),
        journal_digest=digest.hexdigest(),
    )
