"""Servers to check: simulated ones, made as often as needed, and one that runs somewhere."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

from refitfsm.drivers.http import HttpTransport
from refitfsm.sim.config import SimConfig
from refitfsm.sim.conformance.runner import Maker
from refitfsm.sim.conformance.subject import Subject
from refitfsm.sim.content import tiny_tensors
from refitfsm.sim.server import SimServer
from refitfsm.sim.transport import SimTransport
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.offer import BytesOffer, Target
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.plan import ChunkPlan, PushPlan, PushWish, plan_list
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource

CHUNK_BYTES_MAX = 20_000
"""Cuts the simulator's tiny model into a few chunks."""


class TinyWeights:
    """The simulator's tiny model of one seed, as a source of weights."""

    def __init__(self, seed: int) -> None:
        self._tensors = tiny_tensors(seed)
        self._specs = {
            name: TensorSpec.of(name, dtype, shape) for name, (dtype, shape, _) in self._tensors.items()
        }

    @property
    def manifest(self) -> Manifest:
        """See `WeightSource.manifest`."""
        return Manifest(tuple(self._specs.values()))

    def plan(self, wish: PushWish) -> PushPlan:
        """See `WeightSource.plan`."""
        return plan_list(self.manifest, min(wish.chunk_bytes_max, CHUNK_BYTES_MAX))

    def offer(self, chunk: ChunkPlan, target: Target) -> BytesOffer:
        """See `WeightSource.offer`."""
        entry = cpu_payload((self._specs[name], self._tensors[name][2]) for name in chunk.names)
        return BytesOffer((entry,) * len(target.ranks))

    def release(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


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
async def connected(url: str, sources: Sequence[CheckpointSource]) -> AsyncIterator[Subject]:
    """The server at a URL. The first of the sources is what it serves; any seed but 0 means the second."""
    transport = HttpTransport(url)
    try:
        yield Subject(transport, lambda seed: sources[min(seed, 1)])
    finally:
        await transport.aclose()
