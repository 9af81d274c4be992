"""The front end's two locks: the pause gate and the lock between requests and weight updates.

Both behave as SGLang's: a pause that aborts holds the gate while it waits; requests hold the update
lock as readers until their last token; updates take it as writers unless the server is paused; and a
waiting writer keeps new readers out.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PauseGate:
    """A flag behind a condition. `paused` may be read at any time."""

    def __init__(self) -> None:
        self.condition = asyncio.Condition()
        self.paused = False

    async def passed(self) -> None:
        """Wait until nothing is paused. Does not yield when the way is free."""
        if not self.paused and not self.condition.locked():
            return
        async with self.condition:
            await self.condition.wait_for(lambda: not self.paused)


class UpdateLock:
    """Many readers or one writer; writers first. Waiters of a kind are served in order."""

    def __init__(self) -> None:
        self.readers = 0
        self.writing = False
        self._waiting_writers: deque[asyncio.Future[None]] = deque()
        self._waiting_readers: deque[asyncio.Future[None]] = deque()

    @property
    def held(self) -> bool:
        """Whether any reader or writer has it."""
        return self.writing or self.readers > 0

    async def read(self) -> "Reading":
        """Become a reader. Does not yield when the way is free."""
        if self.writing or self._waiting_writers:
            await self._queue(self._waiting_readers)
        else:
            self.readers += 1
        return Reading(self)

    def end_read(self) -> None:
        """Stop being a reader; `Reading.end` calls this once."""
        self.readers -= 1
        self._pass_on()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[None]:
        """Be the only one."""
        if self.held:
            await self._queue(self._waiting_writers)
        else:
            self.writing = True
        try:
            yield
        finally:
            self.writing = False
            self._pass_on()

    async def _queue(self, waiters: deque[asyncio.Future[None]]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was our turn already: hand it on
                if waiters is self._waiting_writers:
                    self.writing = False
                else:
                    self.readers -= 1
            elif turn in waiters:
                waiters.remove(turn)
            self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the lock to whoever is next."""
        if self.held and (self.writing or self._waiting_writers):
            return
        if self._waiting_writers:
            self.writing = True
            self._waiting_writers.popleft().set_result(None)
            return
        while self._waiting_readers:
            self.readers += 1
            self._waiting_readers.popleft().set_result(None)


class Reading:
    """One reader's hold of the lock, which may end before its request does."""

    def __init__(self, lock: UpdateLock) -> None:
        self._lock: UpdateLock | None = lock

    def end(self) -> None:
        """Let go. Idempotent."""
        if self._lock is not None:
            self._lock.end_read()
            self._lock = None
