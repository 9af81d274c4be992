"""An event loop in a thread of its own, that ends with nothing left pending."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 60.0


class LoopThread:
    """Runs coroutines for threads that have no loop. `close` cancels what still runs, and waits for it."""

    def __init__(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(ready)), daemon=True)
        self._thread.start()
        ready.wait(WAIT_S)

    async def _live(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._leave = asyncio.Event()
        ready.set()
        await self._leave.wait()

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """The result of a coroutine that runs on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the loop does not end: something on it cannot be cancelled"
