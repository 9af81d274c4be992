"""In which order the servers' offers are made, so that a chunk is gathered once and one is alive at a time.

Servers take pushes at their own pace, and a chunk is gathered for all of them. Whoever asks for the chunk
that is whole goes first. The next is gathered when nothing of this one is lent out any more, and when no
server that keeps pace has yet to ask for it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from refitfsm.weights.plan import ChunkPlan

LINGER_S = 1.0
"""How long a server is waited for after its last push, before the others go on without it."""


class _Asked(NamedTuple):
    server: str
    chunk: ChunkPlan


class _Last(NamedTuple):
    """What a server was offered last, and when that was made or came back."""

    chunk: int
    at_s: float


class Turns:
    """Who may make an offer. From any thread.

    After `timeout_s` a server waits for no other's push any more: one that hangs does not hold up all. What
    it was lent stays lent, so each such server costs the ranks another chunk's memory.
    """

    def __init__(self, timeout_s: float, linger_s: float = LINGER_S) -> None:
        self._timeout_s = timeout_s
        self._linger_s = linger_s
        self._changed = threading.Condition()
        self._busy = False
        self._whole: ChunkPlan | None = None
        self._lent: set[_Asked] = set()
        self._waiting: list[_Asked] = []
        self._last: dict[str, _Last] = {}

    @contextmanager
    def turn(self, server: str, chunk: ChunkPlan) -> Iterator[bool]:
        """Inside, nobody else makes an offer. Yields whether the chunk is whole already.

        If the body ends well, the chunk is whole, and lent to the server until `returned`.
        """
        asked = _Asked(server, chunk)
        with self._changed:
            self._wait(asked)
            self._busy = True
            is_whole, self._whole = chunk == self._whole, None
        made = False
        try:
            yield is_whole
            made = True
        finally:
            with self._changed:
                if made:
                    self._whole = chunk
                    self._lent.add(asked)
                    self._last[server] = _Last(chunk.index, time.monotonic())
                self._busy = False
                self._changed.notify_all()

    def returned(self, server: str, chunk: ChunkPlan) -> None:
        """A push has been settled or withdrawn."""
        with self._changed:
            self._lent.discard(_Asked(server, chunk))
            self._last[server] = _Last(chunk.index, time.monotonic())
            self._changed.notify_all()

    def _wait(self, asked: _Asked) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        self._waiting.append(asked)
        try:
            while not self._may_go(asked):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self._lent.clear()  # whoever comes next need not wait as long
                    self._changed.wait_for(lambda: not self._busy)  # an offer has a deadline of its own
                    return
                self._changed.wait(min(left_s, self._linger_s))
        finally:
            self._waiting.remove(asked)

    def _may_go(self, asked: _Asked) -> bool:
        if self._busy:
            return False
        if asked.chunk == self._whole:
            return True
        others = [other for other in self._waiting if other.server != asked.server]
        if any(other.chunk == self._whole or other.chunk.index < asked.chunk.index for other in others):
            return False
        # A server that asks again is through with its last push, however that ended.
        if any(lent.server != asked.server and lent.chunk != asked.chunk for lent in self._lent):
            return False
        return not any(self._is_awaited(server, asked) for server in self._last if server != asked.server)

    def _is_awaited(self, server: str, asked: _Asked) -> bool:
        """Whether a server will most likely soon ask for a chunk before this one."""
        index, at_s = self._last[server]
        return index + 1 < asked.chunk.index and time.monotonic() < at_s + self._linger_s
