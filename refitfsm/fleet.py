"""The public face: a fleet of SGLang servers that goes through refit cycles."""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from refitfsm import policies
from refitfsm.audit.journal import FileJournal, Journal, NoJournal, header
from refitfsm.audit.sink import Logger, LogSink
from refitfsm.controller import Controller
from refitfsm.drivers.base import ServerGone
from refitfsm.drivers.http import HttpTransport
from refitfsm.drivers.push import Aside, Threads
from refitfsm.drivers.room import Meter, NvmlMeter, Rooms
from refitfsm.drivers.sglang import SGLangDriver
from refitfsm.drivers.transport import Transport
from refitfsm.errors import CommandRefused, ConfigError, ControllerClosed, NotServing, RequestFailed
from refitfsm.generation import Generation, read_answer, request_body
from refitfsm.hooks import Hook, called
from refitfsm.model.fleet import FleetView, Goal, admits
from refitfsm.model.rules import FailurePolicy
from refitfsm.planner.cycle import is_reached
from refitfsm.planner.requests import Request, refusal
from refitfsm.pushes import Pushes, Weights, check_version
from refitfsm.reports import CycleReport, FleetStatus, aborted, joined, phases_s
from refitfsm.servers import ServerSpec, checked_specs
from refitfsm.weights.errors import WeightsError

GENERATE_S = 600.0
"""How long an answer may take, unless the caller says otherwise."""


class Fleet:
    """SGLang servers under one controller.

        async with Fleet.connect(urls, policy="colocated") as fleet:
            await fleet.generate([1, 2, 3])
            await fleet.release()              # the trainer has the GPU
            await fleet.refit(weights, version=1)

    Use from one event loop; `refitfsm.BlockingFleet` is the same for code without one.
    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        policy: policies.NamedPolicy,
        *,
        run_id: str | None = None,
        journal: Journal | None = None,
        gpus: Mapping[str, tuple[str, ...]] | None = None,
        allow_unknown_version: bool = False,
        logger: Logger | None = None,
        aside: Aside | None = None,
        meter: Meter | None = None,
        controls: Callable[..., Controller] = Controller,  # a check may give it another planner
    ) -> None:
        """A fleet over transports that exist already. Most callers want `connect`."""
        self.run_id = run_id or secrets.token_hex(4)
        self.policy = policy
        rules = policy.rules
        if rules.on_failure is FailurePolicy.QUARANTINE and rules.floor > len(transports):
            raise ConfigError(
                f"policy {policy.name}: floor is {rules.floor} and there are {len(transports)} servers;"
                " give more servers, or a lower floor"
            )
        # A source may keep one server's offer waiting for another's: each has a thread, and one to spare.
        self._threads = Threads(2 * len(transports))
        rooms = Rooms(meter, policy.policy.memory_margin_bytes)
        self._drivers = {
            name: SGLangDriver(
                transport,
                self.run_id,
                server=name,
                gpus=(gpus or {}).get(name, ()),
                allow_unknown_version=allow_unknown_version,
                aside=aside or self._threads,
                rooms=rooms,
            )
            for name, transport in transports.items()
        }
        self._journal = journal if journal is not None else NoJournal()
        self._sink = LogSink(self.run_id, logger)
        self._controller: Controller | None = None
        self._pushes = Pushes(self._drivers, policy.policy, self._warn)
        self._asking = asyncio.Lock()  # held while a server is asked something: no cycle opens meanwhile
        self._controls, self._closed = controls, False

    @classmethod
    def connect(
        cls,
        servers: Iterable[str | ServerSpec],
        *,
        policy: str | Path = "colocated",
        journal: str | Path | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        run_id: str | None = None,
        allow_unknown_version: bool = False,
        logger: Logger | None = None,
    ) -> Self:
        """A fleet of running servers; enrolled on entering it as a context.

        Connecting claims that every server is in its ordinary serving state: started, with all of its
        memory. SGLang cannot be asked which memory is released.

        Raises:
            ConfigError: a URL is given twice or is none, GPUs overlap, the policy is wrong.
            AuditError: the journal cannot be created.
        """
        named = policies.load(policy)
        specs = checked_specs(servers, share_gpus=named.policy.share_gpus)
        run_id = run_id or secrets.token_hex(4)
        if not run_id.isalnum():
            raise ConfigError(f"run_id {run_id!r}: use letters and digits only")
        names = tuple(sorted(spec.url for spec in specs))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(
            {
                spec.url: HttpTransport(spec.url, api_key=api_key, admin_api_key=admin_api_key)
                for spec in specs
            },
            named,
            run_id=run_id,
            journal=None
            if journal is None
            else FileJournal(journal, header(run_id, named.rules, names, now)),
            gpus={spec.url: spec.gpus for spec in specs},
            allow_unknown_version=allow_unknown_version,
            logger=logger,
            meter=NvmlMeter() if any(spec.gpus for spec in specs) else None,
        )

    # -- life ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            self._journal.set_aside()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Enrol every server and open the gates. Entering the fleet as a context does this.

        Raises:
            ConfigError: a server cannot be reached or does not fit; the message says which and why.
        """
        if self._controller is not None:
            raise ConfigError("the fleet was started already: make a new one")
        self._controller = self._controls(
            FleetView.of(self._drivers),
            self.policy.rules,
            self._drivers,
            self._journal,
            drain_budget_s=self.policy.policy.drain_budget_s,
            emit=self._sink.emit,
        )
        cycle = await self._controller.run(Request(Goal.ENROL))
        if cycle is None or not is_reached(cycle) or cycle.failed:
            reasons = "; ".join(f"{server}: {why}" for server, why in cycle.failed) if cycle else ""
            raise ConfigError(f"cannot connect: {reasons or (cycle.reason if cycle else 'no servers')}")

    async def shutdown(self) -> None:
        """Let go of the servers, which stay as they are: a released one stays released. Idempotent."""
        self._closed = True
        if self._controller is not None:
            await self._controller.aclose()
        self._journal.close()
        self._pushes.clear()
        for driver in self._drivers.values():
            await driver.aclose()
        self._threads.close()

    @property
    def _running(self) -> Controller:
        if self._closed:
            raise ControllerClosed("the fleet was shut down: make a new one")
        if self._controller is None:
            raise ControllerClosed("the fleet is not started: use `async with`, or await start()")
        return self._controller

    def status(self) -> FleetStatus:
        """What is believed now. Nothing is sent."""
        running = self._running
        view = running.fleet
        return FleetStatus(
            self.run_id,
            self.policy.name,
            view.serving_version,
            view.cycle,
            tuple(view.servers.values()),
            {name: gate.in_flight for name, gate in running.gates.items()},
        )

    def _warn(self, text: str) -> None:
        asyncio.get_running_loop().call_soon(self._sink.warn, text)

    # -- cycles --------------------------------------------------------------------------------------

    async def release(self) -> CycleReport:
        """Give the policy's memory tags to the trainer. Nothing to do under a policy that keeps memory.

        Raises:
            CommandRefused: not legal now. CycleAborted: a server failed.
        """
        return await self._cycle(Request(Goal.RELEASE))

    async def resume(self) -> CycleReport:
        """Serve again with the weights that the servers kept.

        Raises:
            CommandRefused: their weights are gone, or a cycle is open. CycleAborted: a server failed.
        """
        return await self._cycle(Request(Goal.RESUME))

    async def refit(
        self,
        weights: Weights,
        version: int,
        *,
        before_push: Hook | None = None,
        after_push: Hook | None = None,
    ) -> CycleReport:
        """Put new weights in place on every server, and serve them once all have them.

        The fleet serves `version` when this returns, or what it served before when it raises.

        A trainer that keeps its weights elsewhere while servers generate gives hooks: `before_push` brings
        them to the GPU and makes room for the servers', `after_push` takes them away and so makes room for
        the servers' caches. When `after_push` raises, the weights stay staged: `commit` goes on from there.

        Args:
            weights: must not change until the push is over. A source that is given is not closed.
            version: above the version that is served.
            before_push: called before anything is asked of a server; may be a coroutine function.
            after_push: called when every server has proved its weights, and none serves them yet.

        Raises:
            ConfigError: the weights do not fit the servers' model; nothing was sent.
            CommandRefused: not legal now; nothing was sent.
            CycleAborted: a server failed; the message says which, why, and what is left.
        """
        if before_push is not None:
            self.check_refit(version)
            await called(before_push)
        if after_push is None:
            return await self._push(Goal.REFIT, weights, version)
        staged = await self._push(Goal.STAGE, weights, version)
        await called(after_push)
        return joined(staged, await self.commit(version))

    async def stage(self, weights: Weights, version: int) -> CycleReport:
        """Put new weights in place on every server, without serving them: `commit` does.

        What else was released stays with the trainer until then. Arguments and errors are those of `refit`.
        """
        return await self._push(Goal.STAGE, weights, version)

    async def commit(self, version: int) -> CycleReport:
        """Serve the version that was staged. May be called again after it failed.

        Raises:
            CommandRefused: it is not what the servers hold, or not legal now; nothing was sent.
            CycleAborted: a server failed.
        """
        check_version(version)
        report = await self._cycle(Request(Goal.COMMIT, version))
        self._pushes.staged_serve()
        return report

    def check_refit(self, version: int) -> None:
        """Whether a refit to this version would be taken now. Nothing is sent.

        Raises:
            ConfigError: it is no version. CommandRefused: not legal now.
        """
        check_version(version)
        why = refusal(self._running.fleet, Request(Goal.REFIT, version, (1,)), self.policy.rules)
        if why is not None:
            raise CommandRefused(*why)

    async def _push(self, goal: Goal, weights: Weights, version: int) -> CycleReport:
        check_version(version)
        async with self._asking:
            await self._pushes.ask(self._running.fleet)
        try:
            source = self._pushes.prepare(weights, self._running.fleet)
            report = await self._cycle(Request(goal, version, self._pushes.chunk_bytes(source)))
        except WeightsError as error:
            raise ConfigError(f"weights: {error}") from error
        finally:
            if self._controller is None or self._controller.fleet.cycle is None:
                self._pushes.clear()  # else a cycle goes on although its caller was cancelled
        self._pushes.in_place(source, serve=goal is Goal.REFIT)
        return report

    async def invalidate_kv_cache(self) -> CycleReport:
        """Empty the cache of every server, confirmed, and go on.

        Raises:
            CommandRefused: not serving. CycleAborted: a server failed.
        """
        return await self._cycle(Request(Goal.FLUSH))

    async def _cycle(self, request: Request) -> CycleReport:
        async with self._asking:
            running = self._running
        cycle = await running.run(request)  # opens before anything else runs
        serving = running.fleet.serving_version
        if cycle is None:
            return CycleReport(0, request.goal, serving, 0.0, {}, ())
        if not is_reached(cycle):
            raise aborted(cycle, running.fleet)
        return CycleReport(
            cycle.id,
            cycle.goal,
            serving,
            running.now_s() - cycle.started_s,
            phases_s(running.timings),
            cycle.failed,
        )

    # -- generation ----------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: Mapping[str, object] | None = None,
        *,
        timeout_s: float = GENERATE_S,
        wait_s: float = 0.0,
        **options: object,
    ) -> Generation:
        """Ask the server with the fewest requests in flight among those whose gate is open.

        A request that a refit interrupts comes back with `finish_reason` "abort" and its tokens so far.

        Args:
            prompt: text, or token ids.
            sampling_params: as SGLang takes them.
            timeout_s: how long the answer may take.
            wait_s: how long to wait for a gate to open.
            options: further fields of SGLang's /generate, such as `return_logprob`.

        Raises:
            NotServing: no gate is open. RequestFailed: no answer; it may be sent again.
        """
        body = request_body(prompt, sampling_params or {}, options)
        server = await self._admitted(wait_s)
        gate = self._running.gates[server]
        gate.enter()
        try:
            answer = await self._drivers[server].generate(body, timeout_s)
        except ServerGone as error:
            self._running.report_death(server, str(error))
            raise RequestFailed(f"{server}: died; send the request again") from error
        except RequestFailed as error:
            raise RequestFailed(f"{server}: {error}") from error
        finally:
            gate.leave()
        generation = read_answer(server, self.run_id, answer)
        if generation.version < 0:
            why = "another process answers: its weights are not this run's"
            self._running.report_death(server, why)
            raise RequestFailed(f"{server}: {why}; send the request again")
        return generation

    async def _admitted(self, wait_s: float) -> str:
        """The name of a server that may be asked now."""
        running = self._running
        try:
            async with asyncio.timeout(wait_s if wait_s > 0 else None):
                while True:
                    gates = running.gates
                    open_ = [name for name, view in running.fleet.servers.items() if admits(view)]
                    if open_:
                        return min(open_, key=lambda name: gates[name].in_flight)
                    if wait_s <= 0:
                        break
                    await running.changed()
        except TimeoutError:
            pass
        states = sorted({f"{view.state}/{view.gate}" for view in running.fleet.servers.values()})
        cycle = running.fleet.cycle
        doing = f"cycle {cycle.id} ({cycle.goal}) is open" if cycle else "no cycle is open"
        raise NotServing(
            f"fleet: no server admits requests: {', '.join(states)}; {doing}; wait with wait_s, or refit"
        )
