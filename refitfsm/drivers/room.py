"""Free memory of a server's GPUs, measured before it takes memory back: without room it kills itself."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from refitfsm.model.states import Tag
from refitfsm.model.values import Capabilities

POLL_S = 0.05
RESERVE_S = 5.0
"""Left of a command's deadline for the command itself."""


class Meter(Protocol):
    """Measures GPUs of this machine."""

    def free_bytes(self, gpu_uuid: str) -> int | None:
        """What a GPU has free now; None if it cannot be measured from here."""
        ...


class NvmlMeter:
    """By NVML, which needs no CUDA context and sees every process. Without `pynvml` it measures nothing."""

    def __init__(self) -> None:
        try:
            import pynvml  # noqa: PLC0415 - optional

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no package, no driver, no GPU: all the same here
            self._nvml = None
        else:
            self._nvml = pynvml

    def free_bytes(self, gpu_uuid: str) -> int | None:
        """See `Meter.free_bytes`."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu_uuid.strip().removeprefix('GPU-')}")
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
        except nvml.NVMLError:
            return None


class Rooms:
    """The GPUs of a fleet. On each, one server takes memory back at a time: two would see the same room.

    Args:
        meter: None measures nothing, and lets everybody in at once.
        margin_bytes: what has to stay free on each GPU.
    """

    def __init__(self, meter: Meter | None = None, margin_bytes: int = 0) -> None:
        self._meter = meter
        self._margin_bytes = margin_bytes
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def taken(self, gpus: Sequence[str], needed_bytes: int, deadline_s: float) -> AsyncIterator[str]:
        """Hold the GPUs, each once it has room. Gives an empty text when all have, else why not."""
        if self._meter is None or not needed_bytes:
            yield ""
            return
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout_at(deadline_s - RESERVE_S):
                    for gpu in sorted(set(gpus)):
                        await held.enter_async_context(self._locks[gpu])
            except TimeoutError:
                yield "another server is still taking back its memory on the same GPU"
                return
            yield await self._wait(self._meter, gpus, needed_bytes + self._margin_bytes, deadline_s)

    async def _wait(self, meter: Meter, gpus: Sequence[str], wanted_bytes: int, deadline_s: float) -> str:
        loop = asyncio.get_running_loop()
        while True:
            short = self._short(meter, gpus, wanted_bytes)
            if not short or loop.time() + POLL_S >= deadline_s - RESERVE_S:
                return short
            await asyncio.sleep(POLL_S)

    def _short(self, meter: Meter, gpus: Sequence[str], wanted_bytes: int) -> str:
        for gpu in gpus:
            free = meter.free_bytes(gpu)
            if free is not None and free < wanted_bytes:
                return (
                    f"GPU {gpu} has {free:,} bytes free and {wanted_bytes:,} are needed,"
                    f" {self._margin_bytes:,} of them as a margin: without room the server dies."
                    " Free the trainer's memory, or lower memory_margin_bytes"
                )
        return ""


def needed_bytes(tags: frozenset[Tag], found: Capabilities, pushed_bytes: int) -> int:
    """What a rank takes back with some tags, as far as it is known.

    A server that started beside another counts the other's memory as its weights' and graphs' (it measures
    the whole GPU). So the bytes of the model that is pushed are believed instead, where they are known, and
    graphs, which are small, are left to the margin.
    """
    weights = pushed_bytes // found.tp_size if pushed_bytes else 0
    sizes = {
        Tag.WEIGHTS: min(weights, found.weights_bytes) if weights else found.weights_bytes,
        Tag.KV_CACHE: found.kv_cache_bytes,
    }
    return sum(sizes.get(tag, 0) for tag in tags)
