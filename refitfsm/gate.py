"""Admission: who may ask a server now, and how many requests it still owes an answer."""

import asyncio


class AdmissionGate:
    """Counts the requests in flight to one server, and lets a drain wait for them.

    Whether the gate is open is in the server's view; this only counts. Use from one event loop.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> None:
        self.in_flight += 1
        self._empty.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._empty.set()

    async def drained(self, budget_s: float) -> int:
        """Wait until nothing is in flight, at most `budget_s`; returns how many still are."""
        try:
            async with asyncio.timeout(budget_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return self.in_flight
