"""Proof of content on a real server: what it holds is what was pushed, tensor by tensor."""

import asyncio
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from refitfsm import ConfigError, CycleAborted, Fleet
from refitfsm.weights.files import tiny_checkpoint
from refitfsm.weights.fusion import Heads
from refitfsm.weights.torch_source import TorchSource
from tests.real.server import RealServer

POLICY = """
description = "Content proved."
verify = "content"
chunk_bytes_max = 200000
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start"), seed=0)


@pytest.fixture(scope="module", params=[1, 2])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[RealServer]:
    with RealServer(Path(sys.executable), folder, tp=request.param) as running:
        yield running


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "content.toml"
    path.write_text(POLICY)
    return path


def tensors(tmp_path: Path, seed: int) -> dict[str, torch.Tensor]:
    return load_file(tiny_checkpoint(tmp_path / f"load{seed}", seed=seed) / "model.safetensors")


def heads(given: Mapping[str, torch.Tensor]) -> Heads:
    """By the tiny model's shapes: its heads have 16 elements."""
    rows = [given[f"model.layers.0.self_attn.{name}_proj.weight"].shape[0] for name in "qk"]
    size = given["model.layers.0.self_attn.q_norm.weight"].shape[0] if _has_norms(given) else 16
    return Heads(rows[0] // size, rows[1] // size)


def _has_norms(given: Mapping[str, torch.Tensor]) -> bool:
    return "model.layers.0.self_attn.q_norm.weight" in given


def test_what_was_pushed_is_proved(server: RealServer, policy: Path, tmp_path: Path) -> None:
    """Every tensor of the server is compared, and has the checksum that the sender computes."""
    journal = tmp_path / "audit.jsonl"

    async def life() -> None:
        given = tensors(tmp_path, 1)
        async with Fleet.connect([server.url], policy=policy, journal=journal) as fleet:
            await fleet.refit(TorchSource(given, heads=heads(given)), 1)

    asyncio.run(life())
    assert "tensors have the checksums of what was pushed" in journal.read_text()
    assert "not compared" not in journal.read_text()


def test_a_tensor_that_is_not_what_was_pushed_is_named(
    server: RealServer, policy: Path, tmp_path: Path
) -> None:
    """Tensors that changed between push and proof end the cycle, and the server is not trusted to serve."""
    given = tensors(tmp_path, 2)

    class Changing(TorchSource):
        def compare(self, *arguments, **named):  # type: ignore[no-untyped-def]
            given["model.norm.weight"] += 1
            return super().compare(*arguments, **named)

    async def life() -> None:
        async with Fleet.connect([server.url], policy=policy) as fleet:
            with pytest.raises(CycleAborted, match=r"model\.norm\.weight differ from what was pushed"):
                await fleet.refit(Changing(given, heads=heads(given)), 1)
            good = tensors(tmp_path, 1)
            await fleet.refit(TorchSource(good, heads=heads(good)), 1)

    asyncio.run(life())


def test_weights_without_checksums_are_refused_at_once(
    server: RealServer, policy: Path, folder: Path
) -> None:
    """A folder's weights cannot be proved so: nothing is sent."""

    async def life() -> None:
        async with Fleet.connect([server.url], policy=policy) as fleet:
            with pytest.raises(ConfigError, match=r"verify = content.*use verify = checksum"):
                await fleet.refit(folder, 1)
            assert fleet.status().serving_version == 0

    asyncio.run(life())
