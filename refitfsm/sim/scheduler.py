"""The clock around `Truth`: what the scheduler process does, one message at a time, and how it dies.

Control calls take their turn in order of arrival, each for its drawn duration, and act at the end of
it. Requests run beside them. When something fatal happens the scheduler stops answering at once; a
few seconds later `on_gone` is called, and the server cuts every connection.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from refitfsm.sim.choices import Chooser, between
from refitfsm.sim.config import Span
from refitfsm.sim.requests import Answer, Phase, Request
from refitfsm.sim.truth import Fatal, Truth

T = TypeVar("T")
Emit = Callable[[Request], None]


class _Plan(NamedTuple):
    """A run of steps: seconds before the first, seconds of each, how many."""

    before_s: float
    step_s: float
    steps: int


class _Wait:
    """One wait of a request: for the end of a run of steps, or just for something to change."""

    __slots__ = ("closed", "future", "plan", "request", "started_s")

    def __init__(self, request: Request, plan: _Plan, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.plan = plan
        self.started_s = loop.time()
        self.future: asyncio.Future[bool] = loop.create_future()
        self.closed = False


def _resolve(future: "asyncio.Future[bool]", value: bool) -> None:
    if not future.done():
        future.set_result(value)


class Scheduler:
    """One incarnation of a server's scheduler."""

    def __init__(self, truth: Truth, chooser: Chooser, on_gone: Callable[[str], None]) -> None:
        self.truth = truth
        self.dying: str | None = None
        """The cause, from the fault on."""
        self.outputs = 0
        """How often it has sent anything to the front end; health probes wait for this to grow."""
        self.extra_step_s = 0.0
        """What /slow_down adds to each step."""
        self._timings = truth.config.timings
        self._chooser = chooser
        self._on_gone = on_gone
        self._turn = asyncio.Lock()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._waits: dict[str, _Wait] = {}
        self._idle_waiters: list[asyncio.Future[bool]] = []
        self._death_timer: asyncio.TimerHandle | None = None

    # --- time and death ---------------------------------------------------------------------------

    def draw(self, label: str, span: Span) -> float:
        """A duration in seconds, by the server's Chooser."""
        low, high = span
        return low if low >= high else between(self._chooser, f"{self.truth.name}.{label}", low, high)

    async def spend(self, label: str, span: Span) -> None:
        """Let a drawn duration pass outside the scheduler; does not yield when it is zero."""
        seconds = self.draw(label, span)
        if seconds > 0:
            await asyncio.sleep(seconds)

    async def control(self, label: str, span: Span, act: Callable[[], T], *, extra_s: float = 0.0) -> T:
        """Wait for this call's turn, let its duration pass, act, and return what `act` returned."""
        async with self._turn:
            await self._working()
            seconds = self.draw(label, span) + extra_s
            if seconds > 0:
                await asyncio.sleep(seconds)
                await self._working()
            try:
                result = act()
            except Fatal as fatal:
                self.fail(fatal)
                await self._working()
                raise
            self.outputs += 1
            return result

    async def change(self, label: str, span: Span, act: Callable[[], T], *, extra_s: float = 0.0) -> T:
        """As `control`, for what the tokens of running requests depend on."""

        def changing() -> T:
            self.interrupt_all()
            try:
                return act()
            finally:
                self._requests_changed()

        return await self.control(label, span, changing, extra_s=extra_s)

    async def _working(self) -> None:
        """Return at once while the scheduler works; wait while it is frozen, for ever once it dies."""
        if not self._thawed.is_set():
            await self._thawed.wait()
        if self.dying is not None:
            await asyncio.get_running_loop().create_future()

    def fail(self, fatal: Fatal) -> None:
        """The scheduler process is finished; the connections are cut a few seconds from now."""
        if self.dying is not None:
            return
        self.dying = fatal.cause
        delay = self.draw("death", self._timings.death_s)
        if fatal.exits:
            delay += self.draw("exit", self._timings.exit_noticed_s)
        self._death_timer = asyncio.get_running_loop().call_later(delay, self._on_gone, fatal.cause)
        self.interrupt_all()

    def end(self, cause: str) -> None:
        """The processes are gone now."""
        self.dying = cause
        if self._death_timer is not None:
            self._death_timer.cancel()

    def freeze(self) -> None:
        """Stop the process, as SIGSTOP does: nothing is answered and no token made until `thaw`."""
        self._thawed.clear()
        self.interrupt_all()

    def thaw(self) -> None:
        """Let it go on, as SIGCONT does."""
        self._thawed.set()
        self.interrupt_all()

    # --- idleness and pausing ---------------------------------------------------------------------

    async def idle_within(self, timeout_s: float) -> bool:
        """Wait until nothing runs or waits, no longer than this; whether that is so."""
        truth = self.truth
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while truth.running or truth.leaving or truth.waiting:
            if loop.time() >= deadline:
                return False
            changed: asyncio.Future[bool] = loop.create_future()
            self._idle_waiters.append(changed)
            timer = loop.call_at(deadline, _resolve, changed, False)
            await changed
            timer.cancel()
        return True

    def pause(self, mode: str) -> None:
        """Stop stepping; in mode "retract" running requests lose their KV and queue up again."""
        self.truth.scheduler_pause = mode
        if mode == "retract":
            self.truth.retract_all()

    def go_on(self) -> None:
        """Step again, and admit what waits."""
        self.truth.scheduler_pause = None

    def _requests_changed(self) -> None:
        """Admit what can run, and tell whoever waits for idleness."""
        truth = self.truth
        if truth.waiting and truth.scheduler_pause is None:
            room = truth.config.max_running_requests - len(truth.running)
            for rid in list(truth.waiting)[:room]:
                request = truth.waiting.pop(rid)
                request.phase = Phase.RUNNING
                truth.running[rid] = request
                self._interrupt(rid)
        if self._idle_waiters and not (truth.running or truth.leaving or truth.waiting):
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                _resolve(waiter, True)

    # --- requests ---------------------------------------------------------------------------------

    def abort(self, rid: str) -> None:
        """Mark a request: a waiting one ends at once, a running one after one more step."""
        request = self.truth.running.get(rid) or self.truth.waiting.get(rid)
        if request is not None:
            request.abort_asked = True
            self._interrupt(rid)

    def abort_all(self, prefix: str = "") -> None:
        """Abort every request whose id begins with `prefix`."""
        for rid in [*self.truth.running, *self.truth.waiting]:
            if rid.startswith(prefix):
                self.abort(rid)

    async def generate(self, request: Request, emit: Emit | None = None) -> Answer:
        """Run one request to its end. `emit` is called after each token, else tokens come in runs."""
        await self._working()
        self.truth.waiting[request.rid] = request
        if request.client_gone_s is not None:
            asyncio.get_running_loop().call_later(request.client_gone_s, self.abort, request.rid)
        self._requests_changed()
        try:
            await self._to_the_end(request, emit)
        except asyncio.CancelledError:
            self.truth.drop(request)
            self._requests_changed()
            raise
        ran = request.phase is Phase.RUNNING
        answer = self.truth.finish(request, aborted=request.abort_asked)
        self.outputs += 1
        if ran:
            self._leave()
        self._requests_changed()
        return answer

    def _leave(self) -> None:
        """The next step was launched before the last token was known; its rest outlasts the answer's way."""
        seconds = self.draw("leave", (0.0, self._timings.decode_s[1] + self.extra_step_s))
        if seconds > 0:
            self.truth.leaving += 1
            asyncio.get_running_loop().call_later(seconds, self._left, self.truth.incarnation)

    def _left(self, incarnation: int) -> None:
        """A request that was answered is out of the batch."""
        if incarnation == self.truth.incarnation:
            self.truth.leaving -= 1
            self._requests_changed()

    async def _to_the_end(self, request: Request, emit: Emit | None) -> None:
        while not (request.abort_asked and request.phase is Phase.WAITING):
            if not self._steps(request):
                await self._wait(request, None)
                continue
            prefill = self.draw("prefill", self._timings.prefill_s) if not request.kv else 0.0
            try:
                self.truth.compute(request)
            except Fatal as fatal:
                self.fail(fatal)
                continue
            if await self._make(request, prefill, emit):
                return

    def _steps(self, request: Request) -> bool:
        """Whether the scheduler makes tokens for this request now."""
        working = self._thawed.is_set() and self.dying is None
        return working and request.phase is Phase.RUNNING and self.truth.scheduler_pause is None

    async def _make(self, request: Request, prefill_s: float, emit: Emit | None) -> bool:
        """Make tokens until the last one (True) or until something changes (False)."""
        had = len(request.tokens)
        left = request.max_new_tokens - had
        if request.abort_asked or emit is not None:
            left = min(left, 1)
        step = self.draw("decode", self._timings.decode_s) + self.extra_step_s
        whole = await self._wait(request, _Plan(prefill_s - request.lead_s, step, left))
        self.outputs += 1
        if emit is not None and len(request.tokens) > had:
            emit(request)
        return whole and (request.abort_asked or len(request.tokens) >= request.max_new_tokens)

    async def _wait(self, request: Request, plan: _Plan | None) -> bool:
        """Wait for the end of the plan (True) or for an interruption (False)."""
        loop = asyncio.get_running_loop()
        wait = _Wait(request, plan or _Plan(0.0, 0.0, 0), loop)
        timer = None
        if plan is not None:
            timer = loop.call_later(plan.before_s + plan.steps * plan.step_s, self._complete, wait)
        self._waits[request.rid] = wait
        try:
            return await wait.future
        finally:
            self._waits.pop(request.rid, None)
            if timer is not None:
                timer.cancel()

    def _complete(self, wait: _Wait) -> None:
        if not wait.closed:
            wait.closed = True
            wait.request.lead_s = 0.0
            self.truth.produce(wait.request, wait.plan.steps)
            _resolve(wait.future, True)

    def interrupt_all(self) -> None:
        """Settle what every running request has made so far, before something changes."""
        for rid in list(self._waits):
            self._interrupt(rid)

    def _interrupt(self, rid: str) -> None:
        """Settle what one request has made so far, and let it look around."""
        wait = self._waits.get(rid)
        if wait is None or wait.closed:
            return
        wait.closed = True
        plan = wait.plan
        if plan.steps:
            elapsed = asyncio.get_running_loop().time() - wait.started_s - plan.before_s
            made = min(plan.steps, max(0, int(elapsed / plan.step_s + 1e-6))) if plan.step_s > 0 else 0
            wait.request.lead_s = elapsed - made * plan.step_s
            self.truth.produce(wait.request, made)
        _resolve(wait.future, False)
