"""An asyncio event loop whose time is virtual.

Time stands still while anything is ready to run and jumps to the next timer when nothing is. A run
takes as long as its computation, and two runs of the same program take the same steps. There are no
sockets and no threads here: whatever tries to use them fails, instead of bringing the wall clock in.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Coroutine
from typing import Final, TypeVar

from refitfsm.sim.choices import Chooser

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Nothing is ready, no timer is set, and the main task is not finished."""


class LivelockError(RuntimeError):
    """Timers are set for now again and again, and the clock stands still."""


class _NoSelector:
    """Stands where a selector would; a virtual loop never sleeps."""

    def select(self, timeout: float | None) -> list[object]:  # noqa: ARG002
        return []

    def close(self) -> None:
        """Nothing to release."""


_RESOLUTION_S: Final = 1e-7
"""Timers this close fire together."""
_MANY_CANCELLED: Final = 100
_JUMPS_MAX: Final = 10_000
"""How often in a row timers may come due without the clock moving."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. `time()` starts at 0.0 and is in seconds.

    With a chooser for `order`, what is due at the same moment runs in the order it picks.
    """

    _scheduled: list[asyncio.TimerHandle]
    _ready: deque[asyncio.Handle]
    _timer_cancelled_count: int

    def __init__(self, order: Chooser | None = None) -> None:
        super().__init__()
        self._now = 0.0
        self._order = order
        self._idle_jumps = 0
        self._selector = _NoSelector()

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """Run what is ready; when nothing is, move the clock to the next timer.

        The base class does the same around a selector; without one it takes a third of the time.
        """
        ready = self._ready
        if not ready:
            self._jump()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 - the loop is what runs handles

    def _jump(self) -> None:
        timers = self._scheduled
        if self._timer_cancelled_count > max(_MANY_CANCELLED, len(timers) // 2):
            timers[:] = [timer for timer in timers if not timer.cancelled()]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0].cancelled():
            heapq.heappop(timers)
            self._timer_cancelled_count -= 1
        if not timers:
            raise DeadlockError(self._stuck())
        if timers[0].when() > self._now:
            self._now = timers[0].when()
            self._idle_jumps = 0
        elif self._idle_jumps > _JUMPS_MAX:
            raise LivelockError(
                f"virtual time stands at {self._now:.3f} s, and timers are set for it for ever"
            )
        self._idle_jumps += 1
        limit = self._now + _RESOLUTION_S
        due = []
        while timers and timers[0].when() <= limit:
            due.append(heapq.heappop(timers))
        if self._order is not None:
            while len(due) > 1:
                self._ready.append(due.pop(self._order.choose("order", len(due))))
        self._ready.extend(due)

    def _stuck(self) -> str:
        waiting = sorted(pending_tasks(self), key=_task_order)
        names = "; ".join(f"{task.get_name()}: {_where(task)}" for task in waiting)
        return f"nothing is scheduled at virtual time {self._now:.3f} s, {len(waiting)} tasks wait: {names}"

    def _process_events(self, event_list: list[object]) -> None:
        """There are no events: the selector never reports any."""

    def _write_to_self(self) -> None:
        """Called to wake a sleeping selector; this one never sleeps."""


def pending_tasks(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[object]]:
    """The unfinished tasks of a loop, in no particular order."""
    return [task for task in asyncio.all_tasks(loop) if not task.done()]


def _task_order(task: asyncio.Task[object]) -> tuple[int, str]:
    """Creation order for tasks with default names, which are numbered."""
    name = task.get_name()
    return (len(name), name)


def _where(task: asyncio.Task[object]) -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return "no frame"
    code = frames[-1].f_code
    return f"{code.co_qualname}:{frames[-1].f_lineno}"


def run(main: Coroutine[object, object, T], *, order: Chooser | None = None) -> T:
    """Run `main` to its end on a fresh virtual loop and return its result.

    `order` picks what runs first of what is due at the same moment.

    Tasks still unfinished then are cancelled, as `asyncio.run` does.

    Raises:
        DeadlockError: `main` waits for something that nothing will ever do. The message lists the
            pending tasks and the place each waits at.
        LivelockError: virtual time does not move any more.
    """
    loop = VirtualLoop(order)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    except LivelockError:
        loop.set_exception_handler(_forget)  # there are tasks that cannot be ended, and that is known
        raise
    finally:
        end(loop)


def _forget(_loop: asyncio.AbstractEventLoop, _context: object) -> None:
    """What is left of a run that hangs is no news."""


def end(loop: VirtualLoop) -> None:
    """Cancel what still runs on a loop, wait for it, and close the loop."""
    try:
        rest = sorted(pending_tasks(loop), key=_task_order)
        for task in rest:
            task.cancel()
        if rest:
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
