"""Proof of content on a real server: what it holds is what was pushed, tensor by tensor."""

import asyncio
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from refitfsm import ConfigError, CycleAborted, Fleet
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.files import tiny_checkpoint
from refitfsm.weights.fusion import Heads
from refitfsm.weights.readback import Sample, is_same
from refitfsm.weights.torch_source import TorchSource
from tests.real.server import RealServer

POLICY = """
description = "Content proved."
verify = "{level}"
chunk_bytes_max = 200000
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start"), seed=0)


@pytest.fixture(scope="module", params=[1, 2])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[RealServer]:
    with RealServer(Path(sys.executable), folder, tp=request.param) as running:
        yield running


def policy_of(tmp_path: Path, level: str) -> Path:
    path = tmp_path / f"{level}.toml"
    path.write_text(POLICY.format(level=level))
    return path


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return policy_of(tmp_path, "content")


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


def test_what_no_checksum_covers_is_read_back(server: RealServer, policy: Path, tmp_path: Path) -> None:
    """Without the heads, attention is unknown on a CPU server of two ranks: its queries are read back."""
    journal = tmp_path / "audit.jsonl"

    async def life() -> None:
        async with Fleet.connect([server.url], policy=policy, journal=journal) as fleet:
            await fleet.refit(TorchSource(tensors(tmp_path, 3)), 1)

    asyncio.run(life())
    said = journal.read_text()
    assert "tensors have the checksums of what was pushed" in said
    if "--tp" in server._command:
        assert "2 others were read back, as they were pushed; model.layers.0.self_attn.k_proj.weight" in said
    else:
        assert "read back, as" not in said


class Lossy(TorchSource):
    """Sends another number for the first one of a tensor than it has."""

    def __init__(self, given: Mapping[str, torch.Tensor], name: str) -> None:
        super().__init__(given)
        self.first = given[name].view(-1)[:1]

    def offer(self, *arguments, **named):  # type: ignore[no-untyped-def]
        kept = self.first.clone()
        self.first += 2**-20
        try:
            return super().offer(*arguments, **named)  # bytes, made here
        finally:
            self.first.copy_(kept)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_sample_finds_a_tensor_that_is_not_what_was_pushed(
    server: RealServer, tmp_path: Path, name: str
) -> None:
    """One number that is a millionth off ends the cycle; what is pushed right after is good."""
    journal = tmp_path / "audit.jsonl"
    policy = policy_of(tmp_path, "sample")

    async def life() -> None:
        async with Fleet.connect([server.url], policy=policy, journal=journal) as fleet:
            with pytest.raises(CycleAborted, match=f"sample: {name} differ from what was pushed"):
                await fleet.refit(Lossy(tensors(tmp_path, 2), name), 1)
            await fleet.refit(tensors(tmp_path, 1), 1)
            await fleet.refit(tiny_checkpoint(tmp_path / "folder", seed=4), 2)

    asyncio.run(life())
    assert "8 of 21 tensors were read back, as they were pushed" in journal.read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """What a server makes of float32 in a narrower format is what is expected of it, ties and all."""
    torch.manual_seed(1)
    wide = torch.cat(
        [torch.randn(4000), torch.arange(1, 4000) / 2**14 + 1, torch.tensor([7e4, 3.4e38, -0.0])]
    )
    held = [value if math.isfinite(value) else None for value in wide.to(dtype).tolist()]
    sent = TorchSource({"a": wide.reshape(1, -1)}).head("a", wide.numel())
    assert sent == tuple(wide.tolist())
    assert is_same(Sample("a", 1, len(sent), is_vector=False), sent, held) is True


def test_a_source_shows_its_first_values() -> None:
    """Row by row, of any shape that can be sent; a name that it lacks is an error."""
    source = TorchSource({"a": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3), "b": torch.tensor(2)})
    assert source.head("a", 4) == (0, 1, 2, 3)
    assert source.head("b", 4) == (2,)
    with pytest.raises(WeightsError, match="no tensor 'c' here"):
        source.head("c", 1)


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
