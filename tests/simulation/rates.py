"""How fast lives are played: `python -m tests.simulation.rates`, some minutes on one core.

Rates are in CPU seconds of one process, and beside each stands how many links of a chain of SHA-256 the same
process did in a second, before and after: compare the ratio, not the rate, between machines.
"""

import functools
import hashlib
import json
import resource
import subprocess
import sys
import time
from typing import Final, NamedTuple

import msgspec

from refitfsm import policies
from refitfsm.model.rules import FailurePolicy
from refitfsm.sim.choices import SeededChooser
from refitfsm.sim.faults import Kind
from refitfsm.sim.life import play
from refitfsm.sim.played import Settings

LINKS: Final = 1_000_000
HARMLESS: Final = (Kind.REFUSE, Kind.STATUS_BEFORE, Kind.DELAY)
"""Faults after which a fleet goes on without a restart."""


class Measure(NamedTuple):
    """One life, and what is wanted of it."""

    name: str
    servers: int
    cycles: int
    every: int
    """One call in so many is befallen; 0: none."""
    goal: str


MEASURES: Final = (
    Measure("server-cycles", 1_000, 3, 0, "3,000 server-cycles a CPU second"),
    Measure("one refit with faults", 10_000, 1, 1_000, "20 s, 300 MB"),
)


def links_per_s() -> float:
    """A plain loop of this machine, as a measure of it."""
    began, link = time.process_time(), b""
    for _ in range(LINKS):
        link = hashlib.sha256(link).digest()
    return LINKS / (time.process_time() - began)


def measured(measure: Measure) -> dict[str, object]:
    """Play the life in this process, which should have done nothing else."""
    named = policies.load("always_on")
    spares = functools.partial(msgspec.structs.replace, on_failure=FailurePolicy.QUARANTINE)
    policy = policies.NamedPolicy("spares", spares(named.policy, floor=measure.servers // 2))
    kinds = HARMLESS if measure.every else ()
    life = Settings(policy, measure.servers, measure.cycles, kinds, measure.every or 2)
    before = links_per_s()
    began, began_wall = time.process_time(), time.perf_counter()
    played = play(life, SeededChooser(1))
    cpu_s, wall_s = time.process_time() - began, time.perf_counter() - began_wall
    links = (before + links_per_s()) / 2
    refits = played.cycles.total()
    rate = measure.servers * refits / cpu_s
    return {
        **measure._asdict(),
        "refits": dict(played.cycles),
        "faults": played.faults.total(),
        "records": played.records,
        "healed": played.healed,
        "broken": list(played.broken),
        "cpu_s": round(cpu_s, 1),
        "wall_s": round(wall_s, 1),
        "cpu_s_per_refit": round(cpu_s / refits, 1),
        "server_cycles_per_cpu_s": round(rate),
        "links_per_cpu_s": round(links),
        "links_per_server_cycle": round(links / rate),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    """Each measure in a process of its own."""
    if len(sys.argv) > 1:
        one = next(measure for measure in MEASURES if measure.name == sys.argv[1])
        print(json.dumps(measured(one)), flush=True)
        return
    for measure in MEASURES:
        subprocess.run([sys.executable, "-m", "tests.simulation.rates", measure.name], check=True)


if __name__ == "__main__":
    main()
