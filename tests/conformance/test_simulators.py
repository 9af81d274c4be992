"""The conformance checks on the simulator, in process and over HTTP."""

import asyncio

import pytest

from refitfsm.drivers.http import HttpTransport
from refitfsm.sim.config import SimConfig, Timings
from refitfsm.sim.http import serve
from refitfsm.sim.loop import run
from refitfsm.sim.server import SimServer
from refitfsm.sim.transport import SimTransport
from tests.conformance.checks import CHECKS, Check
from tests.conformance.lethal import LETHAL
from tests.conformance.subject import Subject
from tests.support.world import TinySource

VERSIONS = ("0.5.12", "0.5.16", "0.5.23")
NAMES = [item.__name__ for item in (*CHECKS, *LETHAL)]
EVERY = [*CHECKS, *LETHAL]
QUICK_DEATH = Timings(
    death_s=(0.05, 0.05),
    exit_noticed_s=(0.01, 0.01),
    pause_poll_s=0.05,
    health_poll_s=0.05,
    decode_s=(0.004, 0.004),
)


def config(version: str, timings: Timings) -> SimConfig:
    return SimConfig(sglang_version=version, memory_saver=True, skip_warmup=True, timings=timings)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("check", EVERY, ids=NAMES)
def test_the_simulator_conforms(check: Check, version: str) -> None:
    """Every check holds on the simulator in process, on the virtual clock."""

    async def life() -> None:
        server = SimServer(config(version, Timings()), name="subject")
        await check(Subject(SimTransport(server), TinySource))

    run(life())


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
@pytest.mark.parametrize("check", EVERY, ids=NAMES)
def test_the_simulator_over_http_conforms(check: Check, version: str) -> None:
    """Every check holds on the simulator behind a real socket."""

    async def life() -> None:
        server = SimServer(config(version, QUICK_DEATH), name="subject")
        running = await serve(server, "127.0.0.1", 0)
        transport = HttpTransport(running.url)
        try:
            await check(Subject(transport, TinySource))
        finally:
            await transport.aclose()
            await running.stop()

    asyncio.run(life())
