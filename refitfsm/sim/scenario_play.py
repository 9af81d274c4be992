"""Plays a scenario on the virtual clock: its steps in turn, then what must and must not have been seen."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from refitfsm.controller import Controller
from refitfsm.drivers.transport import NotSent, TransportError
from refitfsm.errors import (
    CommandRefused,
    ConfigError,
    CycleAborted,
    InvariantViolation,
    NotServing,
    RefitError,
    RequestFailed,
)
from refitfsm.generation import Generation
from refitfsm.reports import CycleReport
from refitfsm.sim import scenario_steps as steps
from refitfsm.sim.loop import DeadlockError, LivelockError, run
from refitfsm.sim.scenario import Play, Scenario
from refitfsm.sim.scenario_sights import LAWS, OF_EVERYBODY, Sight, Wanted
from refitfsm.sim.scenario_weights import HandWeights, TrainerWeights
from refitfsm.sim.scenario_world import OWN_DEATH, Owner, World

LIMIT_S: Final = 20_000.0
"""Simulated seconds: what has not ended by then does not end."""
_LAST_S: Final = 10.0
"""Some more at the end: a server's death shows after five."""


class Played(NamedTuple):
    """How one play of a scenario went."""

    wrong: tuple[str, ...]
    """What was not as it had to be, each in a sentence; empty if all was."""
    seen: tuple[Sight, ...]
    """Everything that was seen, in order."""
    seconds: float
    """Simulated."""


class Told(NamedTuple):
    """How a scenario went, both of its plays."""

    scenario: Scenario
    by_hand: Played | None
    fleet: Played | None

    @property
    def wrong(self) -> tuple[str, ...]:
        """What has to be looked at. A scenario that is open is wrong when refitfsm passes it."""
        found = [f"by hand: {words}" for words in self.by_hand.wrong] if self.by_hand else []
        if not self.scenario.open:
            found += self.fleet.wrong if self.fleet else ()
        elif self.fleet is not None and not self.fleet.wrong:
            found.append(f"it is open ({self.scenario.open}), and refitfsm passes it: take the mark away")
        return tuple(found)


def tell(scenario: Scenario) -> Told:
    """Play all of a scenario.

    Raises:
        ConfigError: its policy or its servers are none.
    """
    by_hand, fleet = scenario.by_hand, scenario.fleet
    return Told(
        scenario,
        play(scenario, by_hand) if by_hand is not None else None,
        play(scenario, fleet) if fleet is not None else None,
    )


def play(scenario: Scenario, part: Play, controls: Callable[..., Controller] = Controller) -> Played:
    """Play one play of a scenario. Errors are those of `tell`.

    Args:
        scenario: it.
        part: its `by_hand` or its `fleet`.
        controls: makes the fleets' controllers; a check may give them another planner.
    """
    player = _Player(scenario, part, controls)
    try:
        return run(player.play())
    except (DeadlockError, LivelockError) as error:
        return Played((f"must never be seen: something_never_ends: {error}",), player.seen, LIMIT_S)
    except ConfigError as error:
        if not scenario.open:
            raise
        return Played((str(error),), (), 0.0)  # what is missing may be a key of a policy


class _Player:
    def __init__(self, scenario: Scenario, part: Play, controls: Callable[..., Controller]) -> None:
        self._scenario = scenario
        self._controls = controls
        self._part = part
        self._is_fleet = part is scenario.fleet
        self._wrong: list[str] = []
        self._beside: list[asyncio.Task[None]] = []

    @property
    def seen(self) -> tuple[Sight, ...]:
        """So far."""
        return tuple(self._world.seen)

    async def play(self) -> Played:
        try:
            self._world = World(self._scenario, self._part, self._controls)
        except ValueError as error:
            raise ConfigError(f"scenario {self._scenario.name}: {error}") from error
        await self._go_through(self._part.steps)
        await self._settle()
        await asyncio.sleep(_LAST_S)
        self._world.at_the_end()
        for owner in self._world.owners.values():
            owner.live = False
            await owner.fleet.shutdown()
        self._world.judge_journals()
        return Played((*self._wrong, *self._judged()), self.seen, asyncio.get_running_loop().time())

    async def _go_through(self, given: Sequence[steps.AnyStep]) -> None:
        for number, step in enumerate(given, 1):
            if step.after_s is None:
                await self._bounded(number, step)
                self._world.look_at_rest()
            else:
                self._beside.append(asyncio.create_task(self._later(number, step)))

    def _judged(self) -> list[str]:
        """What was seen and must not be, and what was not seen."""
        seen, part = self._world.seen, self._part
        everywhere = LAWS if self._is_fleet else OF_EVERYBODY
        laws = [law for law in everywhere if law not in part.unavoidable]
        forbidden = [Wanted.of(written) for written in dict.fromkeys((*part.never, *laws))]
        found = [sight for wanted in forbidden if (sight := wanted.first(seen)) is not None]
        wrong = [f"must never be seen: {sight}" for sight in sorted(found)]
        missed = [written for written in part.sometimes if Wanted.of(written).first(seen) is None]
        wrong += [f"was never seen: {written}" for written in missed]
        needless = [law for law in part.unavoidable if Wanted(law).first(seen) is None]
        wrong += [f"is called unavoidable and was not seen: {law}" for law in needless]
        for server, faults in self._world.faults.items():
            idle = [words for words, plan in faults.plans if not plan.struck]
            wrong += [f"befell no call: the fault {words} of {server}" for words in idle]
        return wrong

    # -- one step ------------------------------------------------------------------------------------

    async def _later(self, number: int, step: steps.AnyStep) -> None:
        await asyncio.sleep(step.after_s or 0.0)
        await self._bounded(number, step)

    async def _bounded(self, number: int, step: steps.AnyStep) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._do(number, step)
        except TimeoutError:
            self._world.note("something_never_ends", f"step {number}, {_name(step)}")
        except InvariantViolation as error:
            self._world.note("law_is_broken", f"step {number}, {_name(step)}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no way for a call to end
            self._world.note("odd_error", f"step {number}, {_name(step)}: {error!r}")

    async def _settle(self) -> None:
        tasks, self._beside = self._beside, []
        if tasks:
            await asyncio.gather(*tasks)

    async def _do(self, number: int, step: steps.AnyStep) -> None:
        if isinstance(step, steps.FleetStep):
            await self._expected(number, step)
        elif isinstance(step, steps.Raw):
            await self._call(number, step)
        elif isinstance(step, steps.OfServer):
            self._outside(step)
        elif isinstance(step, steps.Wait):
            await asyncio.sleep(step.seconds)
        elif isinstance(step, steps.Repeat):
            for _ in range(step.times):
                await self._go_through(step.steps)
        elif isinstance(step, steps.Settle):
            await self._settle()
        elif isinstance(step, steps.Cancel):
            tasks, self._beside = self._beside, []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        elif isinstance(step, steps.Take):
            if not self._world.ledger.take(step.gpu, step.holder, step.nbytes):
                free = self._world.ledger.free(step.gpu)
                self._world.note("trainer_has_no_room", f"{step.gpu} {step.nbytes} bytes, {free} are free")
        else:
            self._world.ledger.give_back(step.gpu, step.holder)

    # -- through a fleet -----------------------------------------------------------------------------

    async def _expected(self, number: int, step: steps.FleetStep) -> None:
        try:
            await self._ask_fleet(step)
        except RefitError as error:
            said = f"{type(error).__name__}: {error}"
            self._note_error(step, error, said)
            if step.fails is None and not step.may_fail:
                self._wrong.append(f"step {number}, {_name(step)}: {said}")
            elif step.fails is not None and step.fails not in said:
                self._wrong.append(f"step {number}, {_name(step)}: was to fail with {step.fails!r}: {said}")
        else:
            if step.fails is not None:
                self._wrong.append(f"step {number}, {_name(step)}: it did not fail with {step.fails!r}")

    def _note_error(self, step: steps.FleetStep, error: RefitError, said: str) -> None:
        name = "call_is_refused"
        if isinstance(step, steps.Connect):
            name = "connect_is_refused"
        elif isinstance(error, CycleAborted):
            name = "cycle_aborts"
        elif isinstance(error, NotServing):
            name = "request_is_turned_away"
        elif isinstance(error, RequestFailed):
            name = "request_fails"
        elif not isinstance(error, CommandRefused | ConfigError):
            return
        self._world.note(name, said)

    async def _ask_fleet(self, step: steps.FleetStep) -> None:
        world = self._world
        if isinstance(step, steps.Connect):
            await self._connect(step)
            return
        owner = world.of(step.by)
        if owner is None:
            raise ConfigError(f"{step.by} has no fleet: connect first")
        if isinstance(step, steps.Leave):
            world.look()
            owner.live = False
            await owner.fleet.shutdown()
        elif isinstance(step, steps.Generate):
            await self._generate(owner, step)
        else:
            report = await (
                self._push(owner, step) if isinstance(step, steps.Weights) else _cycle(owner, step)
            )
            world.note("cycle_commits", f"{step.by} {_name(step)} {report.version}")
            for server, reason in report.failed:
                world.note("server_drops_out", f"{server} {reason}")

    async def _connect(self, step: steps.Connect) -> None:
        owner = self._world.owner(step)
        try:
            await owner.fleet.start()
        except RefitError:
            await owner.fleet.shutdown()
            raise
        self._world.enrolled(owner)

    async def _push(self, owner: Owner, step: steps.Weights) -> CycleReport:
        version = owner.tried + 1 if step.version is None else step.version
        owner.tried = max(owner.tried, version)
        weights = TrainerWeights(step, version)
        self._world.published(version, weights.seed)
        fleet = owner.fleet
        report = await (fleet.refit if isinstance(step, steps.Refit) else fleet.stage)(weights, version)
        for server in weights.lent:
            if server not in dict(report.failed):  # of the others it is not known whether they still read
                self._world.note(
                    "loan_is_not_returned", f"{server} has version {version}, and it is still lent"
                )
        return report

    async def _generate(self, owner: Owner, step: steps.Generate) -> None:
        """All requests at once; the first error is the step's, once all have ended."""

        async def one() -> Generation:
            params = {"max_new_tokens": step.max_new_tokens}
            return await owner.fleet.generate(step.prompt, params, wait_s=step.wait_s)

        results = await asyncio.gather(*(one() for _ in range(step.times)), return_exceptions=True)
        for result in results:
            if isinstance(result, Generation):
                words = f"{result.server} version {result.version} {result.finish_reason}"
                self._world.note("request_is_answered", words)
                if result.finish_reason == "abort":
                    self._world.note("request_is_cut_short", words)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    # -- past every fleet ----------------------------------------------------------------------------

    async def _call(self, number: int, step: steps.Raw) -> None:
        path, body, method = _request(step, self._world)
        try:
            async with asyncio.timeout(step.timeout_s):
                reply = await self._world.transports[step.server].request(method, path, body)
            came: int | str = reply.status
        except NotSent:
            came = "refused"
        except TransportError:
            came = "lost"
        except TimeoutError:
            came = "timeout"
            self._world.note("call_has_no_answer", f"{step.server} {path}")
        if step.answers not in (None, came):
            self._wrong.append(f"step {number}, {path} to {step.server}: {came} came, not {step.answers}")

    def _outside(self, step: steps.OfServer) -> None:
        server = self._world.servers[step.server]
        match step:
            case steps.Kill():
                server.kill(OWN_DEATH)
            case steps.KillScheduler():
                server.kill_scheduler(OWN_DEATH)
            case steps.Restart():
                if not server.restart():
                    self._world.note("trainer_has_no_room", f"{step.server} cannot start: its GPUs are full")
            case steps.Freeze():
                server.freeze()
            case steps.Thaw():
                server.thaw()
            case steps.Arm():
                self._world.faults[step.server].arm(step.fault)


def _cycle(owner: Owner, step: steps.FleetStep) -> Awaitable[CycleReport]:
    match step:
        case steps.Release():
            return owner.fleet.release()
        case steps.Resume():
            return owner.fleet.resume()
        case steps.Commit():
            return owner.fleet.commit(step.version)
    return owner.fleet.invalidate_kv_cache()


def _request(step: steps.Raw, world: World) -> tuple[str, bytes | None, str]:
    """Path, body and method of a call by hand."""
    if isinstance(step, steps.Call):
        return step.path, None if step.method == "GET" else msgspec.json.encode(step.body), step.method
    if isinstance(step, steps.Push):
        world.digests.setdefault(step.version, HandWeights(step.version).digest)
        ranks = world.servers[step.server].config.tp_size
        return "/update_weights_from_tensor", HandWeights(step.version).body(step, ranks), "POST"
    assert isinstance(step, steps.Ask)  # noqa: S101 - for the type checker
    params = {"max_new_tokens": step.max_new_tokens}
    body = {"input_ids": step.prompt, "sampling_params": params, "stream": False}
    return "/generate", msgspec.json.encode(body), "POST"


def _name(step: steps.Step) -> str:
    """The word that a step has in a file."""
    return str(type(step).__struct_config__.tag)
