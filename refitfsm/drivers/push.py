"""What a push needs beside the wire: the weights of the open refit, and where their source does its work."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.offer import Offer, Target
from refitfsm.weights.plan import ChunkPlan
from refitfsm.weights.source import WeightSource

T = TypeVar("T")


class Aside(Protocol):
    """Where the work of a weight source is done: it copies, encodes and waits."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class Threads:
    """Beside the event loop, in threads of its own, so that other servers' answers are not kept waiting."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(max(1, count), thread_name_prefix="refitfsm-weights")

    async def __call__(self, work: Callable[[], T]) -> T:
        """Do it; a caller that is cancelled leaves it to end by itself."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Take no more work. What runs ends by itself."""
        self._threads.shutdown(wait=False)


async def inline(work: Callable[[], T]) -> T:
    """At once: for simulated time, where threads have no place."""
    return work()


class Load(NamedTuple):
    """The weights of the open refit."""

    source: WeightSource
    chunks: tuple[ChunkPlan, ...]


class Making:
    """An offer that is being made in a thread, and is withdrawn if its caller has gone meanwhile."""

    def __init__(self, make: Callable[[], tuple[Offer, bytes]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Offer | None = None
        self._abandoned = False

    def __call__(self) -> tuple[Offer, bytes]:
        offer, body = self._make()
        with self._lock:
            self._made = offer
            abandoned = self._abandoned
        if abandoned:
            offer.withdraw()
        return offer, body

    def abandon(self) -> None:
        """Nobody will send it."""
        with self._lock:
            self._abandoned = True
            made = self._made
        if made is not None:
            made.withdraw()


def offer_and_body(source: WeightSource, chunk: ChunkPlan, target: Target, label: str) -> tuple[Offer, bytes]:
    """An offer and the body of /update_weights_from_tensor with it. `label` goes with the last chunk only.

    Raises:
        WeightsError: a tensor cannot be sent, or not to these ranks.
    """
    offer = source.offer(chunk, target)
    if len(offer.entries) != len(target.ranks):
        offer.withdraw()
        raise WeightsError(
            f"{len(offer.entries)} payloads for {len(target.ranks)} ranks: SGLang dies of too few"
        )
    rest: dict[str, object] = {"load_format": offer.load_format, "flush_cache": False}
    if label:
        rest["weight_version"] = label
    # Payloads are base64, which JSON takes as it is: joining saves a copy of the whole model.
    body = (
        b'{"serialized_named_tensors":["'
        + b'","'.join(offer.entries)
        + b'"],'
        + msgspec.json.encode(rest)[1:]
    )
    return offer, body
