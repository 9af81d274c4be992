"""Journals of simulated fleets, calm and with faults, to try out what reads journals."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from refitfsm import policies
from refitfsm.audit.journal import MemoryJournal, header
from refitfsm.drivers.push import inline
from refitfsm.errors import CommandRefused, CycleAborted
from refitfsm.fleet import Fleet
from refitfsm.sim import loop as virtual
from refitfsm.sim.choices import Chooser, SeededChooser
from refitfsm.sim.chosen import ChosenFaults
from refitfsm.sim.config import SimConfig
from refitfsm.sim.server import SimServer
from refitfsm.sim.swarm import SEEN
from refitfsm.sim.tiny import TinyWeights
from refitfsm.sim.transport import SimTransport

_STARTED: Final = "2000-01-01T00:00:00+00:00"
_SERVERS: Final = 2
_ASKED: Final = 6
"""What somebody asks for in one life."""
_EVERY: Final = 25
"""One in so many calls is befallen."""
_GIVEN_UP_S: Final = 0.02
"""After this a refit is cancelled: somewhere in the middle of it."""


class Recorded(NamedTuple):
    """The journal of one life."""

    name: str
    lines: list[bytes]


def recorded(seed: int) -> Iterator[Recorded]:
    """For each policy one life without faults and one with them; the same for the same seed."""
    for number, policy in enumerate(_policies()):
        for every in (0, _EVERY):
            chooser = SeededChooser(seed * 100 + number)
            lines = virtual.run(_life(policy, chooser, every), order=chooser)
            yield Recorded(f"{policy.name}{', with faults' if every else ''}", lines)


_OTHERS: Final[tuple[tuple[str, str, Mapping[str, object]], ...]] = (
    ("quarantine", "colocated", {"on_failure": "quarantine", "floor": 1}),
    ("hold", "always_on", {"on_failure": "hold", "verify": "checksum"}),
)


def _policies() -> Iterator[policies.NamedPolicy]:
    """Those that ship, and for each way to go on after a failure that none of them has, one."""
    for name in policies.shipped():
        yield policies.load(name)
    for name, like, keys in _OTHERS:
        yield policies.NamedPolicy(name, policies.changed(policies.load(like), keys).policy)


async def _life(policy: policies.NamedPolicy, chooser: Chooser, every: int) -> list[bytes]:
    """Somebody asks for this and that, whatever comes of it."""
    config = SimConfig(memory_saver=bool(policy.policy.release), skip_warmup=True)
    names = [f"s{number}" for number in range(_SERVERS)]
    faults = {name: ChosenFaults(chooser, SEEN, every=every or 2, name=name) for name in names}
    for each in faults.values():
        each.on = False  # a fleet that cannot be enrolled has no journal to speak of
    journal = MemoryJournal(header("sim", policy.rules, names, _STARTED))
    fleet = Fleet(
        {name: SimTransport(SimServer(config, name=name, chooser=chooser), faults[name]) for name in names},
        policy,
        run_id="sim",
        journal=journal,
        aside=inline,
    )
    async with fleet:
        for each in faults.values():
            each.on = bool(every)
        for version in range(1, _ASKED + 1):
            with contextlib.suppress(CommandRefused, CycleAborted, TimeoutError):
                await _ask(fleet, _WISHES[chooser.choose("wish", len(_WISHES))], version)
    return journal.lines


_WISHES: Final = ("release and refit", "refit", "stage and commit", "flush", "give up", "resume")


async def _ask(fleet: Fleet, wish: str, version: int) -> None:
    """One thing that a trainer asks for.

    Raises:
        CommandRefused, CycleAborted, TimeoutError: it did not come to its end.
    """
    weights = TinyWeights(version)
    if wish in ("release and refit", "resume"):
        await fleet.release()
    if wish == "resume":
        await fleet.resume()
    elif wish == "flush":
        await fleet.invalidate_kv_cache()
    elif wish == "stage and commit":
        await fleet.stage(weights, version)
        await fleet.commit(version)
    elif wish == "give up":
        async with asyncio.timeout(_GIVEN_UP_S):
            await fleet.refit(weights, version)
    else:
        await fleet.refit(weights, version)
