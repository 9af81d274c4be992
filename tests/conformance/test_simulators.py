"""The conformance checks on the simulator behind a real socket; `test_catalogue` plays them in process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from refitfsm.drivers.http import HttpTransport
from refitfsm.sim.config import SimConfig, Timings
from refitfsm.sim.conformance.catalogue import EVERY
from refitfsm.sim.conformance.runner import Outcome, Verdict, play_all
from refitfsm.sim.conformance.subject import Subject
from refitfsm.sim.http import serve
from refitfsm.sim.server import SimServer
from refitfsm.sim.tiny import TinyWeights

QUICK = Timings(
    death_s=(0.05, 0.05),
    exit_noticed_s=(0.01, 0.01),
    pause_poll_s=0.05,
    health_poll_s=0.05,
    decode_s=(0.004, 0.004),
)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
def test_the_simulator_over_http_does_what_sglang_is_taken_to_do(version: str) -> None:
    """No check that takes less than 20 s of a clock fails on the simulator behind a real socket."""
    config = SimConfig(sglang_version=version, memory_saver=True, skip_warmup=True, timings=QUICK)

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        running = await serve(SimServer(config, name="subject"), "127.0.0.1", 0)
        transport = HttpTransport(running.url)
        try:
            yield Subject(transport, TinyWeights)
        finally:
            await transport.aclose()
            await running.stop()

    async def life() -> list[Outcome]:
        return [outcome async for outcome in play_all(make, (check for check in EVERY if not check.slow))]

    outcomes = asyncio.run(life())
    assert [(each.check.name, each.reason) for each in outcomes if each.verdict is Verdict.FAIL] == []
    assert sum(each.verdict is Verdict.PASS for each in outcomes) >= 90
