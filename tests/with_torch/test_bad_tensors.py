"""Tensors that cannot be pushed, given to a fleet: a clear error, nothing sent, and the version is kept."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch

from refitfsm import ConfigError
from refitfsm.sim.config import FAST, SimConfig
from refitfsm.sim.content import digest_of, tiny_model, tiny_tensors
from refitfsm.sim.loop import run
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.torch_source import TorchSource
from tests.support.world import World

Make = Callable[[torch.Tensor], torch.Tensor]


def tiny(seed: int) -> dict[str, torch.Tensor]:
    """The simulated servers' model, as torch has it."""
    return {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
        for name, (_, shape, data) in tiny_tensors(seed).items()
    }


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor without its memory, as a trainer leaves it that offloads."""
    tensor.untyped_storage().resize_(0)
    return tensor


NAME = next(name for name, (_, shape, _) in tiny_tensors(0).items() if len(shape) == 2)
"""A matrix: what is done to it below makes another kind of tensor."""

BAD: dict[str, tuple[Make, str]] = {
    "strided": (lambda w: w.t().contiguous().t(), r"is not contiguous: give tensor.contiguous\(\)"),
    "every second": (lambda w: torch.cat([w, w], dim=1)[:, ::2], "is not contiguous"),
    "meta": (lambda w: w.to("meta"), "is on the meta device and has no values: load the model first"),
    "sparse": (lambda w: w.to_sparse(), r"has layout torch.sparse_coo: give tensor.to_dense\(\)"),
    "csr": (lambda w: w.to_sparse_csr(), r"has layout torch.sparse_csr: give tensor.to_dense\(\)"),
    "quantised": (
        lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
        r"is quantised by torch: give tensor.dequantize\(\)",
    ),
    "no elements": (lambda w: w[:0], r"of shape \[0, \d+\] has no elements: leave it out"),
    "conjugate": (
        lambda w: torch.complex(w, w).conj(),
        r"is a lazy conjugate or negation: give resolve_conj",
    ),
    "negation": (lambda w: torch.complex(w, w).conj().imag, "is a lazy conjugate or negation"),
    "nested": (lambda w: torch.nested.nested_tensor([w, w]), "is a nested tensor: give plain ones"),
    "no memory": (emptied, "has given up its memory: bring its values back first"),
    "other shape": (lambda w: w[:1], r"has shape \[1, \d+\], and \[\d+, \d+\] was expected"),
    "other format": (lambda w: w.half(), "has dtype F16, and F32 was expected"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_bad_tensor_is_refused_before_anything_is_sent(kind: str, shared: bool) -> None:
    """The error names the tensor and the remedy, no record is written, and the same version can follow."""
    make, reason = BAD[kind]

    async def life() -> None:
        world = World(2, "always_on")
        async with world.fleet as fleet:
            await world.refit(1)
            written = len(world.journal.lines)
            given = tiny(2)
            given[NAME] = make(given[NAME].clone())
            with pytest.raises((ConfigError, WeightsError), match=rf"[tT]ensor '{NAME}' {reason}") as caught:
                await fleet.refit(TorchSource(given, share_host_memory=shared) if shared else given, 2)
            assert "\n" not in str(caught.value)
            assert len(world.journal.lines) == written
            assert (fleet.status().serving_version, fleet.status().cycle) == (1, None)
            await fleet.refit(tiny(2), 2)
            world.digests[2] = digest_of(tiny_model(2))
            assert len(world.serving()) == 2
            world.check()
        world.check_journal()

    run(life())


@pytest.mark.parametrize(
    ("device", "gpus", "reason"),
    [
        ("cpu", (), "s0: rank 0 is on the CPU, the tensors are on GPU-b: give CPU tensors"),
        (
            "cuda",
            ("GPU-a",),
            "s0: rank 0 is on GPU GPU-a, the tensors are on GPU-b: give tensors of the rank's",
        ),
    ],
)
def test_tensors_where_a_server_cannot_map_them_are_refused_before_anything_is_sent(
    device: Literal["cpu", "cuda"], gpus: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server dies of such a push. The error names server and rank, and the fleet serves on."""

    async def life() -> None:
        config = SimConfig(timings=FAST, skip_warmup=True, device=device)
        world = World(2, "always_on", config=config, gpus={"s0": gpus, "s1": gpus})
        async with world.fleet as fleet:
            await world.refit(1)
            written = len(world.journal.lines)
            source = TorchSource(tiny(2), share_host_memory=True)
            monkeypatch.setattr(source._replicas[0].memory, "place", "GPU-b", raising=False)
            monkeypatch.setattr(source, "_settle_in", lambda: None)
            with pytest.raises(ConfigError, match=f"^weights: {reason}"):
                await fleet.refit(source, 2)
            assert len(world.journal.lines) == written
            assert len(world.serving()) == 2
            world.check()

    run(life())


def test_a_name_given_twice_is_refused_before_anything_is_sent() -> None:
    """Pairs with one name twice are a mistake, even where both are the same tensor."""

    async def life() -> None:
        world = World(1, "always_on")
        async with world.fleet as fleet:
            given = tiny(2)
            with pytest.raises(ConfigError, match=rf"weights: tensor '{NAME}' is given twice"):
                await fleet.refit([*given.items(), (NAME, given[NAME])], 1)
            assert fleet.status().serving_version == 0
            world.check()

    run(life())


def test_tied_tensors_arrive_under_both_names() -> None:
    """Two names of one storage are pushed as two tensors, whose values are then the same."""

    async def life() -> None:
        world = World(1, "always_on")
        async with world.fleet as fleet:
            given = tiny(1)
            twin = next(n for n, t in given.items() if n != NAME and t.shape == given[NAME].shape)
            given[twin] = given[NAME]
            await fleet.refit(given, 1)
            held = world.servers["s0"].truth.weights
            assert held.tensor(twin) == held.tensor(NAME)

    run(life())


def test_a_replica_that_differs_is_refused() -> None:
    """Replicas hold the same tensors: another shape is named."""
    with pytest.raises(WeightsError, match=r"a replica differs from the first tensors: .*'w'"):
        TorchSource({"w": torch.zeros(2)}, replicas=[{"w": torch.zeros(3)}])
