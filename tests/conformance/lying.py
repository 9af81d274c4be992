"""Servers that say that they did what they did not do."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from refitfsm.drivers.transport import Reply
from refitfsm.sim.config import SimConfig
from refitfsm.sim.conformance.runner import Maker
from refitfsm.sim.conformance.subject import Subject
from refitfsm.sim.server import SimServer
from refitfsm.sim.tiny import TinyWeights
from refitfsm.sim.transport import SimTransport


class Liar(SimTransport):
    """Answers some paths with what it is told to, and does nothing there."""

    lies: Mapping[str, Reply] = {}

    async def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """The lie, where there is one."""
        lie = self.lies.get(path)
        return await super().request(method, path, body) if lie is None else lie


def lying(lies: Mapping[str, Reply]) -> Maker:
    """Makes servers of the newest release that lie so."""

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        transport = Liar(SimServer(SimConfig(skip_warmup=True)))
        transport.lies = lies
        yield Subject(transport, TinyWeights)

    return make
