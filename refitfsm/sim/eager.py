"""Start a coroutine now instead of in the next round of the event loop.

Most handlers of a simulated server never wait, or wait once. Python 3.12 has eager tasks for this;
3.11 has not.
"""

import types
from collections.abc import Coroutine, Generator
from typing import NamedTuple


class Left(NamedTuple):
    """What is left of a coroutine that has been run up to its first wait."""

    work: Coroutine[object, object, None]
    waited: object


def first_step(work: Coroutine[object, object, None]) -> Left | None:
    """Run `work` up to its first wait, in the caller's task; None where it ended without one."""
    try:
        return Left(work, work.send(None))
    except StopIteration:
        return None


async def rest(left: Left) -> None:
    """Run what is left to its end. To be made a task."""
    await _rest(left)


@types.coroutine
def _rest(left: Left) -> Generator[object, object, None]:
    work, waited = left
    try:
        while True:
            try:
                sent = yield waited
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # noqa: BLE001 - a cancellation too is the work's to handle
                waited = work.throw(error)
            else:
                waited = work.send(sent)
    except StopIteration:
        return
