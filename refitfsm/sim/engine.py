"""One incarnation of a simulated server: the front end's rules around the scheduler.

The methods are SGLang's calls with their bodies decoded; the shapes of HTTP replies are not here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Final, TypeVar

from refitfsm.sim.choices import Chooser
from refitfsm.sim.config import SimConfig
from refitfsm.sim.front import PauseGate, UpdateLock
from refitfsm.sim.profiles import SimProfile
from refitfsm.sim.requests import Answer, Job, Request
from refitfsm.sim.scheduler import Emit, Scheduler
from refitfsm.sim.truth import Truth

T = TypeVar("T")

FLUSH_REFUSED: Final = "Flush cache failed.\n"
"""What a flush is told while the scheduler is busy."""


class Status(StrEnum):
    """What /health goes by."""

    STARTING = "starting"
    UP = "up"
    UNHEALTHY = "unhealthy"


class Engine:
    """Front end and scheduler of one incarnation; `truth` outlives it."""

    def __init__(self, truth: Truth, chooser: Chooser, on_gone: Callable[[str], None]) -> None:
        self.truth = truth
        self.config: SimConfig = truth.config
        self.profile: SimProfile = truth.profile
        self.scheduler = Scheduler(truth, chooser, on_gone)
        self.gate = PauseGate()
        self.lock = UpdateLock()
        self.status = Status.UP
        self.model_path = self.config.model_path
        self.served_model_name = self.config.served_model_name or self.config.model_path
        self.snapshot: dict[str, str] | None = None
        """What the weights checker compares with."""
        self._flushing = asyncio.Lock()
        self._last_rid = 0

    # --- memory -----------------------------------------------------------------------------------

    async def release(self, tags: Sequence[str] | None) -> None:
        """No lock, no wait for requests: the scheduler dies unless it is idle."""
        span = self.config.timings.release_s
        await self.scheduler.change("release", span, lambda: self.truth.release(tags))

    async def resume(self, tags: Sequence[str] | None) -> None:
        """No lock; the scheduler dies where a tag is not released or a GPU has no room."""
        span = self.config.timings.resume_s
        await self.scheduler.change("resume", span, lambda: self.truth.resume(tags))

    async def flush(self, timeout_s: float) -> tuple[bool, str]:
        """Whether the cache was flushed, and why not. With a timeout, wait in the scheduler for idleness.

        The wait counts the waiting queue in every release, also where an immediate flush does not.
        """
        span = self.config.timings.flush_s
        loop = asyncio.get_running_loop()
        async with self._flushing:
            deadline = loop.time() + timeout_s
            while timeout_s <= 0 or await self.scheduler.idle_within(deadline - loop.time()):
                flushed = await self.scheduler.control("flush", span, self.truth.flush)
                if flushed or timeout_s <= 0:
                    return flushed, FLUSH_REFUSED
        return False, "Timed out waiting for idle state."

    # --- pausing ----------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Close the gate; mode "abort" then waits, holding the gate, until no request is in flight."""
        async with self.gate.condition:
            self._set_paused(True)
            span = self.config.timings.pause_s
            if mode != "abort":
                await self.scheduler.change("pause", span, lambda: self.scheduler.pause(mode))
                return
            await self.scheduler.spend("pause", span)
            while True:
                self.scheduler.abort_all()
                if not self.lock.held:
                    return
                await asyncio.sleep(self.config.timings.pause_poll_s)

    async def go_on(self) -> None:
        """Open the gate, and let the scheduler step. Harmless where nothing is paused."""
        async with self.gate.condition:
            self._set_paused(False)
            await self.scheduler.change("continue", self.config.timings.pause_s, self.scheduler.go_on)
            self.gate.condition.notify_all()

    def _set_paused(self, paused: bool) -> None:
        self.gate.paused = paused
        self.truth.gate_closed = paused

    # --- updates ----------------------------------------------------------------------------------

    async def exclusively(self, work: Callable[[], Awaitable[T]], *, holds_gate: bool = True) -> T:
        """Run an update as its lock asks: beside nothing while paused, else as the only writer.

        While paused the gate is held for the whole update, so that a continue waits for it.
        """
        async with self.gate.condition:
            paused = self.gate.paused
            if paused and holds_gate:
                return await work()
        if paused:
            return await work()
        async with self.lock.write():
            return await work()

    # --- generation -------------------------------------------------------------------------------

    def new_rid(self) -> str:
        """A request id, unique in this server: 32 hexadecimal digits."""
        self._last_rid += 1
        return f"{self.truth.incarnation:016x}{self._last_rid:016x}"

    async def submit(self, job: Job, emit: Emit | None = None) -> list[Answer]:
        """Pass the gate, become a reader of the weights, and run the job's requests side by side."""
        await self.gate.passed()
        job.reading = await self.lock.read()
        try:
            if len(job.requests) == 1:
                return [await self.scheduler.generate(job.requests[0], emit)]
            return await asyncio.gather(*(self.scheduler.generate(each, emit) for each in job.requests))
        finally:
            job.reading.end()

    def hang_up(self, job: Job) -> None:
        """The job's client has gone. Its requests run on until that is noticed, and then are aborted.

        For a plain call the front end looks every few seconds, and is busy with it until then. A stream
        is let go of at once, and aborted a little later: meanwhile only the scheduler knows of it.
        """
        loop = asyncio.get_running_loop()
        timings = self.config.timings
        delay = timings.stream_hangup_s
        if job.stream:
            if job.reading is not None:
                job.reading.end()
        else:
            delay = timings.hangup_poll_s - (loop.time() - job.started_s) % timings.hangup_poll_s
        for request in job.requests:
            request.client_gone_s = delay
            if request.rid in self.truth.running or request.rid in self.truth.waiting:
                loop.call_later(delay, self.scheduler.abort, request.rid)

    async def healthy(self) -> bool:
        """The deep health check: a one-token request, looked after every second.

        Anything that the scheduler says meanwhile counts as life.
        """
        if self.status is Status.STARTING:
            return False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.timings.health_timeout_s
        before = self.scheduler.outputs
        probe = Request(f"HEALTH_CHECK_{self.new_rid()}", (0,), 1, probe=True)
        task = loop.create_task(self.submit(Job([probe])))
        try:
            while loop.time() < deadline:
                await asyncio.sleep(self.config.timings.health_poll_s)
                if self.scheduler.outputs > before:
                    self.status = Status.UP
                    return True
        finally:
            task.cancel()
        self.status = Status.UNHEALTHY
        return False

    async def warm_up(self, seconds: float) -> None:
        """The request that a server sends itself after loading; until it ends, health says no."""
        self.status = Status.STARTING
        first = Request(f"WARMUP_{self.new_rid()}", (0,), 1, probe=True, lead_s=-seconds)
        await self.scheduler.generate(first)
        self.status = Status.UP
