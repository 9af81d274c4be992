"""Waiting for what another process or task does, by its word and not by the clock."""

import asyncio
from collections.abc import Callable

WAIT_S = 20.0


async def until(holds: Callable[[], bool]) -> None:
    """Until it holds. Bounded, so that what never comes is an error and not a hang."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.005)
