"""Simulated servers started from a checkpoint folder, and several of them on loopback."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from refitfsm.errors import ConfigError
from refitfsm.sim.choices import SeededChooser
from refitfsm.sim.config import SimConfig, Timings
from refitfsm.sim.content import DTYPE_BYTES, Parameters, spec_of
from refitfsm.sim.http import serve
from refitfsm.sim.server import SimServer
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.safetensors import CheckpointFolder

DEMO_TIMINGS: Final = dataclasses.replace(Timings(), decode_s=(0.003, 0.004))
"""As measured on one H200, but with a model so small that its bytes take no time to push."""


def load_parameters(folder: Path) -> Parameters:
    """What a server started from this checkpoint holds.

    Raises:
        ConfigError: there is no checkpoint, or it has a number format that is not simulated.
    """
    try:
        with CheckpointFolder.open(folder) as checkpoint:
            for spec in checkpoint.manifest.tensors:
                if spec.dtype not in DTYPE_BYTES:
                    raise ConfigError(
                        f"{folder}: tensor {spec.name!r} is {spec.dtype}, which is not simulated; convert it"
                    )
            return {
                spec.name: spec_of(spec.dtype, spec.shape, checkpoint.tensor(spec.name))
                for spec in checkpoint.manifest.tensors
            }
    except WeightsError as error:
        raise ConfigError(f"model: {error}") from None


def make_server(config: SimConfig, *, name: str = "server", seed: int = 0) -> SimServer:
    """A simulated server whose latencies are drawn from a seed.

    Raises:
        ConfigError: its version is not simulated, or it does not fit its GPUs.
    """
    try:
        return SimServer(config, name=name, chooser=SeededChooser(seed))
    except ValueError as error:
        raise ConfigError(str(error)) from None


@contextlib.asynccontextmanager
async def demo_servers(
    count: int, sglang_version: str, folder: Path, *, memory_saver: bool
) -> AsyncIterator[dict[str, SimServer]]:
    """Servers on free ports of loopback, each on a GPU of its own, by URL.

    Raises:
        ConfigError: the version is not simulated.
    """
    config = SimConfig(
        sglang_version=sglang_version,
        memory_saver=memory_saver,
        cuda_graph_in_saver=memory_saver,
        parameters=load_parameters(folder),
        model_path=str(folder),
        skip_tokenizer_init=True,
        timings=DEMO_TIMINGS,
    )
    async with contextlib.AsyncExitStack() as stack:
        servers: dict[str, SimServer] = {}
        for number in range(count):
            server = make_server(config, name=f"server {number}", seed=number)
            face = await serve(server)
            stack.push_async_callback(face.stop)
            servers[face.url] = server
        yield servers
