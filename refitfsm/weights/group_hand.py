"""Work that may never return, done in a thread that nobody has to wait for.

A collective waits for a rank that has died, and a store on a machine that hangs does not answer. Neither
takes a deadline that holds. Whoever gives the work away can stop waiting.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Hand:
    """One thread, which does one piece of work after another. It does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_do_all, args=(self._queue,), name=name, daemon=True).start()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Have it done, after what was given before."""
        future: Future[T] = Future()

        def do() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it, whatever it is
                future.set_exception(error)
            else:
                future.set_result(result)

        self._queue.put(do)
        return future

    def close(self) -> None:
        """End the thread, once it has done what was given."""
        self._queue.put(None)


def _do_all(queue: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (do := queue.get()) is not None:
        do()
        del do  # it holds the result
