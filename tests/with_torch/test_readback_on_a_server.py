"""A real server of a model that reads nothing back, and whose checkpoint is gone: a tiny Qwen3 on the CPU."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from refitfsm import ConfigError, CycleAborted, Fleet
from refitfsm.weights.files import tiny_checkpoint
from tests.real.server import RealServer, call

HEAD_SIZE, LAYERS = 16, 2
NORM = "model.norm.weight"

Tensors = dict[str, torch.Tensor]


def qwen3(folder: Path, seed: int) -> Tensors:
    """The tiny Llama with a norm for queries and one for keys, which makes it a Qwen3."""
    tiny_checkpoint(folder, seed)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: Tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        for part in "qk":
            tensors[f"model.layers.{layer}.self_attn.{part}_norm.weight"] = torch.ones(HEAD_SIZE)
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("start")
    qwen3(folder, 0)
    with RealServer(Path(sys.executable), folder) as running:
        (folder / "model.safetensors").unlink()
        yield running


def test_names_are_compared_with_the_servers_own(server: RealServer, tmp_path: Path) -> None:
    """The server says which tensors it has; weights of another model are not sent, and its own are."""
    given = qwen3(tmp_path, 1)
    without = {name: tensor for name, tensor in given.items() if name != NORM}
    strange = given | {"model.layers.1.pre_feedforward_layernorm.weight": torch.ones(64)}

    async def life() -> None:
        async with Fleet.connect([server.url], policy="always_on") as fleet:
            with pytest.raises(ConfigError, match=r"'model\.norm\.weight' is not sent"):
                await fleet.refit(without, 1)
            with pytest.raises(ConfigError, match=r"pre_feedforward_layernorm\.weight' is sent, and goes"):
                await fleet.refit(strange, 1)
            assert fleet.status().serving_version == 0
            await fleet.refit(given, 1)

    asyncio.run(life())


def test_a_model_that_reads_nothing_back_fails_a_sample(server: RealServer, tmp_path: Path) -> None:
    """It is no silent pass: the message says what to use instead, and the server takes no harm."""
    policy = tmp_path / "sample.toml"
    policy.write_text('description = "Sampled."\nverify = "sample"\n')

    async def life() -> None:
        async with Fleet.connect([server.url], policy=policy) as fleet:
            with pytest.raises(CycleAborted, match=r"cannot read weights back.*use verify = checksum"):
                await fleet.refit(qwen3(tmp_path / "new", 2), 1)

    asyncio.run(life())
    assert call(server.url, "/get_weights_by_name", {"name": NORM}).status == 400
    assert call(server.url, "/model_info").status == 200
