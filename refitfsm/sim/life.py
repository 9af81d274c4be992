"""One simulated life of a fleet: cycles with faults, then cycles without, judged by laws all the way.

The controller, the driver and the journal are the real ones; servers and clock are simulated. Everything
uncertain is asked of the chooser, so that a life is its choices.
"""

import asyncio
import contextlib
import gc
import hashlib
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Final

from refitfsm.audit.journal import MemoryJournal, header
from refitfsm.audit.verify import verify
from refitfsm.drivers.push import inline
from refitfsm.errors import (
    AuditError,
    CommandRefused,
    ConfigError,
    CycleAborted,
    InvariantViolation,
    RefitError,
)
from refitfsm.fleet import Fleet
from refitfsm.model.fleet import admits, usable
from refitfsm.reports import CycleReport
from refitfsm.sim import loop as virtual
from refitfsm.sim.choices import Chooser, between
from refitfsm.sim.chosen import ChosenFaults
from refitfsm.sim.config import SimConfig, Timings
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.faults import Fault
from refitfsm.sim.judged import Judge
from refitfsm.sim.played import ABORTED, AFTER_RESTART, AS_IT_WAS, COMMITTED, REFUSED, Played, Settings
from refitfsm.sim.server import SimServer
from refitfsm.sim.tiny import TinyWeights
from refitfsm.sim.transport import SimTransport

_STARTED: Final = "2000-01-01T00:00:00+00:00"
"""No wall clock here: the journal of a life is the same to the byte whenever it is played."""
_SETTLE_S: Final = 1000.0
"""Longer than any call, so that what was in flight is over."""
_TIMINGS: Final = Timings(decode_s=(0.04, 0.04))
"""Ten times slower at a token than the GPU that was measured: a token is what costs most to simulate."""
_TOKENS: Final = (6, 6, 6, 400)
"""Of an answer; one in four lasts longer than most policies wait, so that a refit interrupts it."""
_ASKED_MAX: Final = 64
"""Requests at a time: whoever gives one out looks at every server."""
_LATE_S: Final = 1.0
_ANSWER_S: Final = 60.0
_HEAD_START_S: Final = (0.001, 0.05)
"""What requests get before the cycle: some are done then and some are in flight."""


_WAYS: Final = (
    (("release",), ("refit",)),
    ((), ("refit",)),
    (("release",), ("stage", "commit")),
    (("release", "resume"), ("refit",)),
    (("flush", "release"), ("refit",)),
)
"""How a trainer may come to new weights: what it asks for before, and what puts them in place."""
_OF_A_VERSION: Final = ("refit", "stage", "commit")


def play(settings: Settings, chooser: Chooser) -> Played:
    """Play one life to its end.

    Raises:
        ConfigError: the release is not simulated, or the policy does not fit the servers.
    """
    life = _Life(settings, chooser)
    collects = gc.isenabled()
    gc.disable()  # it would look again and again at all servers: a sixth of the time
    try:
        virtual.run(life.run(), order=chooser)
    except (virtual.DeadlockError, virtual.LivelockError) as error:
        life.judge.found("a_cycle_ends_in_time", str(error))
    finally:
        if collects:
            gc.enable()
    return life.played()


class _Quiet:
    """A logger that nobody reads: what happened is in the journal."""

    def bind(self, **values: object) -> "_Quiet":  # noqa: ARG002
        return self

    def log(self, level: int, event: str, **values: object) -> None:
        """Nothing is kept."""


class _Over(Exception):
    """A life cannot go on. What is wrong has been noted."""


class _Life:
    """The servers with their truth, and one fleet after another with its beliefs."""

    def __init__(self, settings: Settings, chooser: Chooser) -> None:
        self._settings = settings
        self._chooser = chooser
        config = SimConfig(
            sglang_version=settings.sglang_version,
            memory_saver=bool(settings.policy.policy.release),
            skip_warmup=True,
            timings=_TIMINGS,
            context_length=2 * max(_TOKENS),
            max_total_num_tokens=4 * max(_TOKENS),
        )
        names = [f"s{number}" for number in range(settings.servers)]
        try:
            self._servers = {name: SimServer(config, name=name, chooser=chooser) for name in names}
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._faults = {
            name: ChosenFaults(
                chooser,
                settings.kinds,
                every=settings.every,
                name=name,
                paths=settings.paths,
                tell=partial(self._befell, name),
            )
            for name in names
            if settings.kinds
        }
        self._digests = {0: digest_of(tiny_model(0))}
        self.judge = Judge(self._servers, self._faults, self._digests)
        self._journals: list[MemoryJournal] = []
        self._cycles: Counter[str] = Counter()
        self._restarts = 0
        self._healed = ""
        self._virtual_s = 0.0
        self._script: list[str] = []
        self._befallen: list[tuple[str, Fault]] = []

    async def run(self) -> None:
        """From the first connection to the last answer.

        Raises:
            ConfigError: the policy does not fit the servers.
        """
        try:
            fleet = await self._with_faults(await self._connect())
            self._healed = await self._without_faults(fleet)
        except _Over:
            pass
        except InvariantViolation as error:
            self.judge.found("laws_of_the_model", str(error))
        self._virtual_s = asyncio.get_running_loop().time()

    def played(self) -> Played:
        """How it went; every journal is closed, and judged by the auditor."""
        records, hashes = 0, hashlib.sha256()
        for number, journal in enumerate(self._journals):
            journal.close()
            try:
                verified = verify(journal.lines)
            except AuditError as error:
                self.judge.found("a_journal_holds", f"journal {number}: {error}")
                continue
            records += verified.records
            hashes.update(verified.hash.encode())
        at_risk = self.judge.at_risk
        at_risk["laws_of_the_model"] = at_risk["a_journal_holds"] = records
        faults: Counter[str] = Counter()
        for each in self._faults.values():
            faults.update({kind.value: count for kind, count in each.struck.items()})
        return Played(
            broken=tuple(self.judge.broken),
            cycles=self._cycles,
            faults=faults,
            at_risk=at_risk,
            restarts=self._restarts,
            healed=self._healed,
            answers=sum(len(server.truth.answers) for server in self._servers.values()),
            records=records,
            journal_digest=hashes.hexdigest(),
            virtual_s=self._virtual_s,
            script=tuple(self._script),
            befallen=tuple(self._befallen),
        )

    # -- script ------------------------------------------------------------------------------------

    def _befell(self, name: str, fault: Fault) -> None:
        self._befallen.append((name, fault))
        self._note(f"{name}: {fault.spec}")

    def _note(self, what: str) -> None:
        self._script.append(f"{asyncio.get_running_loop().time():10.3f} s  {what}")

    # -- fleets --------------------------------------------------------------------------------------

    async def _connect(self) -> Fleet:
        """A fleet of all servers, without faults until it is enrolled: else there would be none."""
        self._set_faults(False)
        policy = self._settings.policy
        run_id = f"life{len(self._journals)}"
        journal = MemoryJournal(header(run_id, policy.rules, list(self._servers), _STARTED))
        fleet = Fleet(
            {name: SimTransport(server, self._faults.get(name)) for name, server in self._servers.items()},
            policy,
            run_id=run_id,
            journal=journal,
            aside=inline,
            logger=_Quiet(),
            controls=self._settings.controls,
        )
        self._journals.append(journal)
        self.judge.enrolled()
        await fleet.start()
        return fleet

    async def _again(self, fleet: Fleet) -> Fleet:
        """What the fleet's errors tell a person to do: restart, and connect again.

        A new fleet knows nothing of what was pushed before, so all servers are started anew. What was on
        its way to the old ones is waited for: nothing tells a server to whom a late call was sent.
        """
        await fleet.shutdown()
        self._set_faults(False)
        await asyncio.sleep(_SETTLE_S)
        for server in self._servers.values():
            server.kill("restarted, as the error said")
            server.restart()
        self._restarts += 1
        self._note("all servers are restarted")
        await asyncio.sleep(_SETTLE_S)
        try:
            return await self._connect()
        except ConfigError as error:
            self.judge.found("a_fleet_heals", f"restarted servers cannot be connected: {error}")
            raise _Over from None

    def _set_faults(self, on: bool) -> None:
        for faults in self._faults.values():
            faults.on = on

    # -- safety --------------------------------------------------------------------------------------

    async def _with_faults(self, fleet: Fleet) -> Fleet:
        """The safety phase: whatever befalls the servers, no law is broken."""
        for version in range(1, self._settings.cycles + 1):
            self._set_faults(True)
            asked = list(map(asyncio.ensure_future, self._requests(fleet)))
            await asyncio.sleep(between(self._chooser, "head start", *_HEAD_START_S))
            ending = await self._cycle(fleet, version)
            await asyncio.gather(*asked)
            self.judge.look(fleet, f"cycle {version}")
            if ending == REFUSED:
                fleet = await self._again(fleet)
        return fleet

    async def _cycle(self, fleet: Fleet, version: int) -> str:
        """New weights, in one of several ways, by a trainer that goes on whatever it is told; the end."""
        self._digests[version] = digest_of(tiny_model(version))
        before, goals = _WAYS[self._chooser.choose("way", len(_WAYS))]
        for what in before:  # whether it matters that one fails, the rest says
            with contextlib.suppress(CycleAborted, CommandRefused):
                await self._in_time(fleet, what, version)
            self.judge.look(fleet, f"cycle {version}, after {what}")
        ending = COMMITTED
        try:
            for what in goals:
                await self._in_time(fleet, what, version)
        except CycleAborted:
            ending = ABORTED
        except CommandRefused:
            ending = REFUSED
        self._cycles[ending] += 1
        self.judge.look(fleet, f"cycle {version}, {ending}")
        return ending

    async def _in_time(self, fleet: Fleet, what: str, version: int) -> None:
        """Wait for a cycle as long as its policy lets it last.

        Raises:
            _Over: it goes on.
            CycleAborted, CommandRefused: as the cycle does.
        """
        self._note(f"{what} version {version}" if what in _OF_A_VERSION else what)
        policy = self._settings.policy.policy
        self.judge.at_risk["a_cycle_ends_in_time"] += 1
        task = asyncio.ensure_future(_asked(fleet, what, version))
        await asyncio.wait([task], timeout=policy.cycle_s + policy.grace_s + _LATE_S)
        if not task.done():
            self.judge.found("a_cycle_ends_in_time", f"{what}: not after {policy.cycle_s:g} s and its grace")
            raise _Over
        try:
            await task
        except (CycleAborted, CommandRefused) as error:
            self._note(f"{what}: {error}")
            raise

    # -- liveness ------------------------------------------------------------------------------------

    async def _without_faults(self, fleet: Fleet) -> str:
        """The liveness phase: the faults are over, so refits get through. How; empty if they do not.

        Without a restart those servers come to serve that the fleet can use, or the refit is refused, which
        is lawful only while there is a server that it cannot use. After a restart all of them do, at once.
        """
        self._set_faults(False)
        self._note("the faults are over")
        await asyncio.sleep(_SETTLE_S)
        self.judge.look(fleet, "after the faults")
        version = self._settings.cycles + 1
        whole, version = await self._heals(fleet, version)
        if whole:
            return AFTER_RESTART if self._restarts else AS_IT_WAS
        if self.judge.broken:
            return ""
        fleet = await self._again(fleet)
        self.judge.at_risk["a_fleet_heals"] += 1
        if await self._cycle(fleet, version) != COMMITTED or self.judge.not_serving(fleet, version):
            self.judge.found("a_fleet_heals", "restarted servers that meet no fault were not refitted")
            return ""
        await self._answers(fleet)
        return AFTER_RESTART

    async def _heals(self, fleet: Fleet, version: int) -> tuple[bool, int]:
        """Whether all servers serve, without a restart; and the next version.

        Each refit may find a server dead that died unnoticed, so there are as many as servers, and two.
        """
        judge = self.judge
        judge.at_risk["a_fleet_heals"] += 1
        for number in range(version, version + self._settings.servers + 2):
            ending = await self._cycle(fleet, number)
            views = fleet.status().servers
            if ending == REFUSED:
                if all(map(usable, views)):
                    judge.found("a_fleet_heals", "a refit is refused, and every server can be used")
                return False, number + 1
            if ending == COMMITTED:
                wrong = judge.not_serving(fleet, number)
                if wrong:
                    judge.found("a_fleet_heals", f"a refit committed, and {wrong} does not serve it")
                await self._answers(fleet)
                return all(map(admits, views)), number + 1
        judge.found("a_fleet_heals", "refits that meet no fault do not commit, and are not refused either")
        return False, version

    async def _answers(self, fleet: Fleet) -> None:
        """Whoever serves is asked, and judged by it."""
        await asyncio.gather(*self._requests(fleet))
        self.judge.look(fleet, "healed")
        await fleet.shutdown()

    def _requests(self, fleet: Fleet) -> list[Coroutine[object, object, None]]:
        """As many as servers, each with a prompt of its own that comes again in every cycle."""
        return [
            _ask(fleet, number, _TOKENS[self._chooser.choose("tokens", len(_TOKENS))])
            for number in range(min(self._settings.servers, _ASKED_MAX))
        ]


def _asked(fleet: Fleet, what: str, version: int) -> Coroutine[object, object, CycleReport]:
    match what:
        case "refit":
            return fleet.refit(TinyWeights(version), version)
        case "stage":
            return fleet.stage(TinyWeights(version), version)
        case "commit":
            return fleet.commit(version)
        case "resume":
            return fleet.resume()
        case "flush":
            return fleet.invalidate_kv_cache()
    return fleet.release()


async def _ask(fleet: Fleet, number: int, tokens: int) -> None:
    """One request; that it fails under faults is no news."""
    with contextlib.suppress(RefitError):
        await fleet.generate(
            [number + 1, 2, 3], {"temperature": 0, "max_new_tokens": tokens}, timeout_s=_ANSWER_S
        )
