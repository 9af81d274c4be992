"""What users, strangers and the environment can do to a fleet, in any order: the laws hold throughout.

The real controller, driver, journal and auditor over simulated servers on one virtual loop. Faults are
armed for the next call of a server: whether the answer, the request or the server is lost is what the
driver meets, not what it is told.
"""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from refitfsm import ConfigError, RefitError
from refitfsm.model.fleet import usable
from refitfsm.model.states import Condition, ServerState
from refitfsm.sim.loop import VirtualLoop, end
from tests.support.armed import ArmedFaults
from tests.support.world import World

T = TypeVar("T")

POLICIES = Path(__file__).parents[1] / "support" / "policies"
FAULTS = (
    "lose-answer",
    "lose-request",
    "status-before=502",
    "status-after=502",
    "status-after=500",
    "success-false",
    "status-before=400",
    "refuse",
    "delay=5",
    "delay=300",
    "hang-before",
    "hang-after",
    "duplicate",
    "garble",
    "slow=5",
    "slow=300",
)
DEADLY = ("kill", "kill-after")
PROMPTS = ([1, 2, 3], [1, 2, 3, 4], [9])
SERVER = st.integers(0, 2)


class FleetMachine(RuleBasedStateMachine):
    """Three servers and a fleet."""

    @initialize(
        policy=st.sampled_from(("colocated", "always_on", "kv_only", "quarantine.toml", "hold.toml")),
        version=st.sampled_from(("0.5.12", "0.5.16", "0.5.23")),
    )
    def start(self, policy: str, version: str) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.faults = [ArmedFaults() for _ in range(3)]
        self.version = 0
        self.tasks: list[asyncio.Task[object]] = []
        self.cycles = 0

        async def make() -> None:
            name = str(POLICIES / policy) if policy.endswith(".toml") else policy
            self.world = World(
                3, name, version=version, faults={f"s{index}": item for index, item in enumerate(self.faults)}
            )
            await self.world.fleet.start()

        self.wait(make())

    def wait(self, work: Coroutine[object, object, T]) -> T:
        return self.loop.run_until_complete(work)

    def attempt(self, work: Coroutine[object, object, object]) -> bool:
        """Do what a user does, who expects errors of ours and no others."""
        try:
            self.wait(work)
        except RefitError as error:
            said = str(error)
        else:
            return True
        assert "\n" not in said
        return False

    # -- users and trainers --------------------------------------------------------------------------

    @rule()
    def release(self) -> None:
        self.attempt(self.world.fleet.release())

    @rule()
    def resume(self) -> None:
        self.attempt(self.world.fleet.resume())

    @rule(step=st.integers(0, 2))
    def refit(self, step: int) -> None:
        """A new version; with step 0 one that was tried or is served already."""
        self.version += step
        self.attempt(self.world.refit(self.version))

    @rule(step=st.integers(0, 1))
    def stage(self, step: int) -> None:
        """A new version that does not serve yet."""
        self.version += step
        self.attempt(self.world.stage(self.version))

    @rule()
    def commit(self) -> None:
        self.attempt(self.world.fleet.commit(self.version))

    @rule()
    def invalidate(self) -> None:
        self.attempt(self.world.fleet.invalidate_kv_cache())

    @rule(prompt=st.sampled_from(PROMPTS), count=st.integers(1, 4))
    def generate(self, prompt: list[int], count: int) -> None:
        async def ask() -> None:
            serving = self.world.fleet.status().serving_version
            work = [self.world.fleet.generate(prompt, {"max_new_tokens": 3}) for _ in range(count)]
            for answer in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(answer, BaseException):
                    assert isinstance(answer, RefitError), answer
                else:
                    assert answer.version == serving

        self.wait(ask())

    @rule(data=st.data())
    def all_at_once(self, data: st.DataObject) -> None:
        """Several callers that do not know of each other."""
        fleet = self.world.fleet
        self.version += 1
        doings = [
            fleet.release,
            fleet.resume,
            lambda: self.world.refit(self.version),
            fleet.invalidate_kv_cache,
            lambda: fleet.generate([1, 2], {"max_new_tokens": 4}, wait_s=1.0),
        ]
        picked = data.draw(st.lists(st.sampled_from(range(len(doings))), min_size=2, max_size=4))

        async def together() -> None:
            results = await asyncio.gather(*(doings[index]() for index in picked), return_exceptions=True)
            assert all(
                not isinstance(item, BaseException) or isinstance(item, RefitError) for item in results
            )

        self.wait(together())

    @rule()
    def cancelled_refit(self) -> None:
        """A caller that is cancelled while its refit runs: the cycle ends all the same."""

        async def cancel() -> None:
            self.version += 1
            task = asyncio.ensure_future(self.world.refit(self.version))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.wait(cancel())
        self.settle()

    # -- strangers and the environment ---------------------------------------------------------------

    @rule(index=SERVER, fault=st.sampled_from(FAULTS))
    def arm(self, index: int, fault: str) -> None:
        self.faults[index].armed.append(fault)

    @rule(index=SERVER, fault=st.sampled_from(DEADLY))
    def arm_death(self, index: int, fault: str) -> None:
        self.faults[index].armed.append(fault)
        self.world.killed.append(f"s{index}")

    @rule(index=SERVER)
    def crash(self, index: int) -> None:
        self.world.kill(f"s{index}")

    @rule(index=SERVER)
    def restart(self, index: int) -> None:
        """The process comes back at the same address, with its start-up weights."""
        server = self.world.servers[f"s{index}"]

        async def again() -> None:
            if not server.truth.alive:
                server.restart()
            await asyncio.sleep(60)

        self.wait(again())

    @rule(seconds=st.sampled_from((0.1, 10.0, 700.0)))
    def time_passes(self, seconds: float) -> None:
        self.wait(asyncio.sleep(seconds))

    @rule()
    def another_fleet(self) -> None:
        """The fleet's owner lets go of it, and starts with fresh servers."""
        self.check_journal()
        self.wait(self.world.fleet.shutdown())
        for faults in self.faults:
            faults.armed.clear()
            faults.doomed = False

        async def make() -> None:
            faults = {f"s{index}": item for index, item in enumerate(self.faults)}
            self.world = World(3, "always_on", faults=faults)
            await self.world.fleet.start()

        self.version = 0
        self.wait(make())

    # -- laws ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the open cycle to end: it must, within its deadline and grace."""

        async def until_closed() -> None:
            for _ in range(70):
                if self.world.fleet.status().cycle is None:
                    return
                await asyncio.sleep(10)
            raise AssertionError(f"still open: {self.world.fleet.status().cycle}")

        self.wait(until_closed())

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "world"):
            return
        assert self.world.fleet.status().cycle is None, "a cycle is open though its caller has its answer"
        self.world.killed += [f"s{index}" for index, faults in enumerate(self.faults) if faults.doomed]
        self.world.check()

    @invariant()
    def nobody_is_left_paused_without_a_reason(self) -> None:
        """After a cycle a server serves, is released, or its condition or the policy says why not."""
        if not hasattr(self, "world") or self.world.fleet.policy.name == "hold":
            return
        status = self.world.fleet.status()
        for view in status.servers:
            old = view.state is ServerState.SERVING and view.content.version == status.serving_version
            if old and usable(view) and view.gate.value != "open":
                assert view.reason or view.attempts, view

    def check_journal(self) -> None:
        found = self.world.check_journal()
        assert found.serving_version == self.world.fleet.status().serving_version

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            if hasattr(self, "world"):
                self.check_journal()
                self.heal_and_finish()
                self.check_journal()
                self.wait(self.world.fleet.shutdown())
        finally:
            end(self.loop)

    def heal_and_finish(self) -> None:
        """With no more faults, a fleet whose servers are all known commits the next refit."""
        for faults in self.faults:
            faults.armed.clear()
        self.settle()
        status = self.world.fleet.status()
        same = all(
            server.truth.alive and server.truth.incarnation == 1 for server in self.world.servers.values()
        )
        known = all(usable(view) and view.condition is not Condition.SUSPECT for view in status.servers)
        if not (same and known):
            return
        self.version += 1
        try:
            self.wait(self.world.refit(self.version))
        except ConfigError as error:  # pragma: no cover - would be a failure of the test's own weights
            raise AssertionError(str(error)) from error
        assert len(self.world.serving()) == 3
        self.world.check()


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=25)
