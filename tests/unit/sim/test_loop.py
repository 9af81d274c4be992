"""The virtual clock."""

import asyncio
import time

import pytest

from refitfsm.sim.choices import SeededChooser
from refitfsm.sim.loop import DeadlockError, VirtualLoop, run


def test_time_passes_only_in_timers() -> None:
    """A day of sleeping takes no wall time and exactly a day of virtual time."""

    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run(main()) == 86_400
    assert time.monotonic() - started < 5


def test_a_timeout_fires_at_its_moment() -> None:
    """asyncio.timeout ends a wait at its deadline on the virtual clock."""

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == 2.5


def test_a_deadlock_names_who_waits() -> None:
    """When nothing can ever happen again, the error lists the waiting tasks by name and place."""

    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        waiting = asyncio.create_task(stuck(), name="patient")
        await waiting

    with pytest.raises(DeadlockError, match=r"patient: .*stuck:\d+"):
        run(main())


def test_the_rest_is_cancelled_at_the_end() -> None:
    """Tasks still running when the main one ends are cancelled, and their cleanup runs."""
    ended = []

    async def other() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(True)

    async def main() -> None:
        main.task = asyncio.create_task(other())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    run(main())
    assert ended == [True]


def test_cancelled_timers_do_not_hold_the_clock() -> None:
    """A cancelled timer neither fires nor moves time, also when there are very many."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        for at in range(1000):
            loop.call_later(10 + at, pytest.fail, "fired").cancel()
        await asyncio.sleep(5_000)
        return loop.time()

    assert run(main()) == 5_000


def _race(order: SeededChooser | None) -> list[int]:
    done: list[int] = []

    async def one(number: int) -> None:
        await asyncio.sleep(1)
        done.append(number)

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(8)))

    run(main(), order=order)
    return done


def test_what_is_due_at_once_runs_in_the_chosen_order() -> None:
    """The order of simultaneous timers is the chooser's, and the same for the same seed."""
    assert _race(None) == _race(None)
    orders = {tuple(_race(SeededChooser(seed))) for seed in range(6)}
    assert len(orders) > 1
    assert _race(SeededChooser(3)) == _race(SeededChooser(3))


def test_the_network_is_not_there() -> None:
    """A socket on the virtual loop fails instead of bringing the wall clock in."""

    async def main() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    with pytest.raises(NotImplementedError):
        run(main())


def test_a_loop_can_be_closed_unused() -> None:
    """Making a loop takes no resource that has to be given back by running it."""
    loop = VirtualLoop()
    assert loop.time() == 0.0
    loop.close()
