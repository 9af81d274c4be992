"""The shell around the planner: inputs in, records to the journal, commands to drivers, answers back.

Everything is decided in `planner.decide`, in one step without an await, so that a fleet needs no lock.
The order inside a step is the point of it: decide, judge again, check the laws, write down, only then
act. The same code runs over real servers and under a simulation's virtual clock.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from refitfsm.audit.journal import Journal
from refitfsm.drivers.base import Driver, Observation
from refitfsm.errors import (
    AuditError,
    CommandRefused,
    ControllerClosed,
    DriverProtocolError,
    InvariantViolation,
)
from refitfsm.gate import AdmissionGate
from refitfsm.machine import Referee
from refitfsm.model.fleet import Cycle, FleetView
from refitfsm.model.laws import broken
from refitfsm.model.records import FleetRecord, Issued, Record, ServerRecord, Turn
from refitfsm.model.rules import Rules
from refitfsm.model.table import BOOK, Book
from refitfsm.model.values import DONE, CommandKind, Event, EventName, Report
from refitfsm.planner.cycle import (
    Abandon,
    Decide,
    Decision,
    Input,
    ServerEvent,
    Tick,
    decide,
    next_deadline_s,
)
from refitfsm.planner.inputs import noted
from refitfsm.planner.requests import Request

Emit = Callable[[tuple[Record, ...]], None]
_GENERAL = (EventName.REFUSED, EventName.FAILED, EventName.LOST, EventName.DIED)


async def _end_of(future: "asyncio.Future[Cycle]") -> None:
    """Wait for the end, however often the wait is cancelled."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue


class Timing(NamedTuple):
    """How long a command took on a server, in seconds, from its issue to its answer."""

    cycle: int
    server: str
    kind: CommandKind
    seconds: float


class _Running(NamedTuple):
    """A command being carried out."""

    issued: Issued
    task: asyncio.Task[None]
    since_s: float


class Controller:
    """Runs one fleet. Use from one event loop.

    Args:
        fleet: what is believed at the start.
        rules: the policy.
        drivers: one for each server, by the server's name.
        journal: where records go before they are acted on.
        drain_budget_s: how long requests in flight are waited for before the pause aborts them.
        emit: called with every step's records, after they are in the journal.
        planner: what decides; checks try others than the shipped one.
        book: the rules by which what was decided is judged again.
    """

    def __init__(
        self,
        fleet: FleetView,
        rules: Rules,
        drivers: Mapping[str, Driver],
        journal: Journal,
        *,
        drain_budget_s: float = 10.0,
        emit: Emit | None = None,
        planner: Decide = decide,
        book: Book = BOOK,
    ) -> None:
        self.fleet = fleet
        self.rules = rules
        self.gates = {name: AdmissionGate() for name in fleet.servers}
        self.timings: list[Timing] = []
        """Of the cycle that ended last, or is open."""
        self._drivers = drivers
        self._journal = journal
        self._drain_budget_s = drain_budget_s
        self._emit = emit
        self._decide = planner
        self._referee = Referee(book)
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._now_s = 0.0
        self._running: dict[str, _Running] = {}
        self._waiters: dict[int, asyncio.Future[Cycle]] = {}
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._stopped: BaseException | None = None

    # -- what callers use ----------------------------------------------------------------------------

    async def run(self, request: Request) -> Cycle | None:
        """Run a cycle to its end. None when the goal was met already.

        When the wait is cancelled the cycle takes no further step toward its goal, and the cancellation is
        passed on once it has ended: nothing that was given for it is read any more then.

        Raises:
            CommandRefused: not legal now; nothing was sent.
            AuditError, InvariantViolation, ControllerClosed: nothing is issued any more.
        """
        decision = self._step(request)
        if decision.refusal is not None:
            raise CommandRefused(*decision.refusal)
        if decision.closed is not None:
            return decision.closed
        if self.fleet.cycle is None:
            return None
        future = self._waiters[self.fleet.cycle.id]
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if self._stopped is None:
                self._step(Abandon("its caller was cancelled"))
            await _end_of(future)
            raise

    def now_s(self) -> float:
        """The planner's clock: seconds since the controller was made. Never runs backwards."""
        self._now_s = max(self._now_s, self._loop.time() - self._started_s)
        return self._now_s

    def report_death(self, server: str, why: str) -> None:
        """Somebody saw that a server's process is gone."""
        if self._stopped is None:
            self._step(ServerEvent(server, Event(EventName.DIED, detail=why)))

    async def changed(self) -> None:
        """Wait for the next step.

        Raises:
            AuditError, InvariantViolation, ControllerClosed: there will be none.
        """
        await self._changed.wait()
        if self._stopped is not None:
            raise self._stopped

    async def aclose(self) -> None:
        """Stop issuing, wait for nothing, leave the servers as they are. Idempotent."""
        self._stop(ControllerClosed("the fleet was shut down"))
        running = [item.task for item in self._running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._journal.close()

    # -- one step ------------------------------------------------------------------------------------

    def _step(self, given: Input) -> Decision:
        if self._stopped is not None:
            raise self._stopped
        now_s = self.now_s()
        decision = self._decide(self.fleet, given, now_s, self.rules)
        try:
            self._check(decision)
            if decision.records:
                self._journal.append((*noted(given), *decision.records), now_s)
        except (AuditError, InvariantViolation) as error:
            self._stop(error)
            raise
        self.fleet = decision.fleet
        self._follow(decision, now_s)
        if self._emit is not None:  # on its own: whoever listens cannot break a step
            self._loop.call_soon(self._emit, decision.records)
        return decision

    def _check(self, decision: Decision) -> None:
        """Judge again, and check the laws wherever something changed."""
        for record in decision.records:
            if isinstance(record, ServerRecord):
                self._referee.check(record)
                law = broken((record.after,), record.facts)
            else:
                moved = record.turn is Turn.COMMITTED
                law = broken(decision.fleet.servers.values(), decision.fleet.facts) if moved else None
            if law is not None:
                raise InvariantViolation(law)

    def _follow(self, decision: Decision, now_s: float) -> None:
        """Do what was decided."""
        for record in decision.records:
            if isinstance(record, FleetRecord) and record.turn is Turn.OPENED and record.cycle:
                self._waiters[record.cycle.id] = self._loop.create_future()
                self.timings = []
            elif isinstance(record, ServerRecord):
                self._drop_stale(record)
        for issued in decision.commands:
            task = self._loop.create_task(self._carry_out(issued))
            task.add_done_callback(functools.partial(self._ended, issued))
            self._running[issued.server] = _Running(issued, task, now_s)
        if decision.closed is not None:
            self._waiters.pop(decision.closed.id).set_result(decision.closed)
        self._arm(decision)
        self._changed.set()
        self._changed = asyncio.Event()

    def _drop_stale(self, record: ServerRecord) -> None:
        """A command that is no longer pending is not waited for."""
        running = self._running.get(record.server)
        pending = record.after.pending
        if running is not None and (pending is None or pending.seq != running.issued.seq):
            del self._running[record.server]
            running.task.cancel()

    def _arm(self, decision: Decision) -> None:
        """Have a Tick at the first deadline.

        Only what a step adds is looked at, so that a step costs the same in a fleet of any size; a timer
        whose command has been answered fires once for nothing.
        """
        times = [issued.deadline_s for issued in decision.commands]
        if self.fleet.cycle is not None:
            times.append(self.fleet.cycle.deadline_s)
        if times and (self._timer is None or min(times) < self._timer_s):
            self._set_timer(min(times))

    def _set_timer(self, at_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if at_s is not None:
            self._timer = self._loop.call_at(self._started_s + at_s, self._tick)
            self._timer_s = at_s

    def _tick(self) -> None:
        self._timer = None
        self._now_s = max(self._now_s, self._timer_s)  # the sum of two floats may fall short of it
        if self._stopped is None:
            self._step(Tick())
            self._set_timer(next_deadline_s(self.fleet))

    def _stop(self, why: BaseException) -> None:
        """Nothing is issued any more. What serves goes on serving."""
        if self._stopped is not None:
            return
        self._stopped = why
        if self._timer is not None:
            self._timer.cancel()
        waiters, self._waiters = self._waiters, {}
        for future in waiters.values():
            future.set_exception(why)
            future.exception()  # a cycle that nobody waits for is no unhandled error
        self._changed.set()

    # -- carrying out --------------------------------------------------------------------------------

    async def _carry_out(self, issued: Issued) -> None:
        observation = await self._observe(issued)
        running = self._running.pop(issued.server, None)
        if running is not None:
            taken_s = self.now_s() - running.since_s
            self.timings.append(Timing(issued.cycle, issued.server, issued.command.kind, taken_s))
        if self._stopped is not None:
            return
        event = Event(
            observation.event,
            cycle=issued.cycle,
            seq=issued.seq,
            report=observation.report,
            detail=observation.detail,
        )
        self._step(ServerEvent(issued.server, event))

    def _ended(self, issued: Issued, task: asyncio.Task[None]) -> None:
        """A driver that breaks its contract is not silent: its command counts as lost, and says why."""
        error = None if task.cancelled() else task.exception()
        if error is None or self._stopped is not None:
            return
        self._running.pop(issued.server, None)
        detail = f"the driver failed: {error!r}"
        event = Event(EventName.LOST, cycle=issued.cycle, seq=issued.seq, detail=detail)
        self._step(ServerEvent(issued.server, event))

    async def _observe(self, issued: Issued) -> Observation:
        if issued.command.kind is CommandKind.DRAIN:
            left = await self.gates[issued.server].drained(self._drain_budget_s)
            return Observation(EventName.DRAINED, report=Report(in_flight=left))
        by_loop = issued._replace(deadline_s=self._started_s + issued.deadline_s)
        observation = await self._drivers[issued.server].execute(by_loop)
        if observation.event not in (*_GENERAL, DONE[issued.command.kind]):
            raise DriverProtocolError(
                f"{issued.server}: {issued.command.kind} ended as {observation.event}, which is no end of it"
            )
        return observation
