"""The blocking fleet: the same as the async one, from any thread, and never left waiting by a shutdown."""

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from refitfsm import BlockingFleet, CommandRefused, ConfigError, ControllerClosed, CycleAborted, RefitError
from refitfsm.sim.config import SimConfig, Timings
from refitfsm.sim.http import HttpFace, serve
from refitfsm.sim.server import SimServer
from tests.support.loop_thread import LoopThread
from tests.support.world import TinySource

WAIT_S = 20.0


class Servers:
    """Simulated servers over HTTP, on a loop of their own."""

    def __init__(self, count: int) -> None:
        self.loop = LoopThread()
        timings = Timings(decode_s=(0.01, 0.01), boot_s=(0.0, 0.0))
        config = SimConfig(skip_warmup=True, timings=timings)

        async def start() -> list[HttpFace]:
            return [await serve(SimServer(config, name=f"s{index}")) for index in range(count)]

        self.faces = self.loop.wait(start())

    @property
    def urls(self) -> list[str]:
        return [face.url for face in self.faces]

    def stop(self) -> None:
        for face in self.faces:
            self.loop.wait(face.stop())
        self.loop.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    running = Servers(2)
    yield running
    running.stop()


def test_a_cycle_from_a_plain_thread(servers: Servers) -> None:
    """Release, refit and generate block and return what the async fleet returns."""
    with BlockingFleet.connect(servers.urls) as fleet:
        before = fleet.generate([1, 2, 3], {"max_new_tokens": 4})
        fleet.release()
        report = fleet.refit(TinySource(1), 1)
        after = fleet.generate([1, 2, 3], {"max_new_tokens": 4})
    assert report.version == after.version == 1
    assert before.output_ids != after.output_ids


def test_a_call_that_a_shutdown_finds_waiting_is_told(servers: Servers) -> None:
    """Another thread's shutdown ends a waiting call with ControllerClosed, and never leaves it hanging."""
    fleet = BlockingFleet.connect(servers.urls)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet.generate, [1], {"max_new_tokens": 1000})
        while not any(fleet.status().in_flight.values()):
            assert not waiting.done(), waiting.exception()
        fleet.shutdown()
        with pytest.raises(RefitError):
            waiting.result(WAIT_S)
    with pytest.raises(ControllerClosed):
        fleet.status()


def test_many_shutdowns_at_once_are_one(servers: Servers) -> None:
    """Concurrent shutdowns all return, and calls beside them raise errors of ours or answer."""
    fleet = BlockingFleet.connect(servers.urls)
    with ThreadPoolExecutor(8) as pool:
        ends = [pool.submit(fleet.shutdown) for _ in range(4)]
        asks = [pool.submit(fleet.status) for _ in range(4)]
        for end in ends:
            end.result(WAIT_S)
        for ask in asks:
            assert ask.exception(WAIT_S) is None or isinstance(ask.exception(), ControllerClosed)


def test_a_fleet_that_cannot_be_made_leaves_no_thread(servers: Servers) -> None:
    """The error of a failed connect comes out of the constructor, and its thread ends."""
    with pytest.raises(ConfigError, match="nobody listens"):
        BlockingFleet.connect([*servers.urls, "http://127.0.0.1:9"])
    for thread in threading.enumerate():
        if thread.name == "refitfsm":
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_errors_travel_between_processes() -> None:
    """Ray and multiprocessing pickle what a worker raises: it arrives as it was."""
    refused = CommandRefused("a", "released", "a_rule", "a remedy")
    aborted = CycleAborted("why", (("a", "reason"),), ("a",))
    for error in (refused, aborted, ConfigError("x"), ControllerClosed("y")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
