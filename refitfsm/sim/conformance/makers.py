"""Servers to check: simulated ones, made as often as needed, and one that runs somewhere."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

from refitfsm.drivers.http import HttpTransport
from refitfsm.sim.config import SimConfig
from refitfsm.sim.conformance.runner import Maker
from refitfsm.sim.conformance.subject import CHUNK_BYTES_MAX, Subject
from refitfsm.sim.server import SimServer
from refitfsm.sim.tiny import TinyWeights
from refitfsm.sim.transport import SimTransport
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource, WeightSource


def simulated(config: SimConfig) -> Maker:
    """Makes simulated servers in this process. The config must have the tiny model of seed 0."""

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        yield Subject(SimTransport(SimServer(config, name="subject")), TinyWeights)

    return make


@contextmanager
def checkpoints(folders: Sequence[Path]) -> Iterator[Sequence[CheckpointSource]]:
    """The weights of two folders: what a server was started with, and others.

    Raises:
        WeightsError: a folder holds no checkpoint.
    """
    with ExitStack() as stack:
        opened = [CheckpointSource(CheckpointFolder.open(folder)) for folder in folders]
        for source in opened:
            stack.enter_context(closing(source))
        yield opened


@asynccontextmanager
async def connected(
    url: str, sources: Sequence[WeightSource], *, chunk_bytes_max: int = CHUNK_BYTES_MAX
) -> AsyncIterator[Subject]:
    """The server at a URL. The first of the sources is what it serves; any seed but 0 means the second."""
    transport = HttpTransport(url)
    try:
        yield Subject(transport, lambda seed: sources[min(seed, 1)], chunk_bytes_max)
    finally:
        await transport.aclose()
