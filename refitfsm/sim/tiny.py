"""The simulator's tiny model as a source of weights."""

from functools import lru_cache

from refitfsm.sim.content import tiny_tensors
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.offer import BytesOffer, Offer, Target
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.plan import ChunkPlan, PushPlan, PushWish, plan_list
from refitfsm.weights.readback import values_of

CHUNK_BYTES_MAX = 20_000
"""Cuts the tiny model into a few chunks."""


class TinyWeights:
    """The tiny model's weights of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @property
    def manifest(self) -> Manifest:
        """See `WeightSource.manifest`."""
        return Manifest(_specs(self.seed))

    def plan(self, wish: PushWish) -> PushPlan:
        """See `WeightSource.plan`."""
        return plan_list(self.manifest, min(wish.chunk_bytes_max, CHUNK_BYTES_MAX))

    def offer(self, chunk: ChunkPlan, target: Target) -> Offer:
        """See `WeightSource.offer`."""
        return BytesOffer((_encoded(self.seed, chunk.names),) * len(target.ranks))

    def head(self, name: str, count: int) -> tuple[float, ...]:
        """The first values of a tensor, for `verify = "sample"`."""
        dtype, _, data = tiny_tensors(self.seed)[name]
        return values_of(dtype, data, count)

    def release(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


@lru_cache(maxsize=64)
def _specs(seed: int) -> tuple[TensorSpec, ...]:
    tensors = tiny_tensors(seed).items()
    return tuple(TensorSpec.of(name, dtype, shape) for name, (dtype, shape, _) in tensors)


@lru_cache(maxsize=512)
def _encoded(seed: int, names: tuple[str, ...]) -> bytes:
    tensors = tiny_tensors(seed)
    return cpu_payload(
        (TensorSpec.of(name, tensors[name][0], tensors[name][1]), tensors[name][2]) for name in names
    )
