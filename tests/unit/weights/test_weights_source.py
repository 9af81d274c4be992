import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from weights_payload_reader import read

from refitfsm import weights
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.files import tiny_checkpoint, write_safetensors
from refitfsm.weights.offer import RankPlace, Target
from refitfsm.weights.plan import ChunkPlan, PushWish, Strategy
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource, WeightSource

TINY_SEED_0 = "505183b93048f44e074ac1cf0e13238f5bff845538e854322cc693cd3947d3de"
RANKS = (RankPlace(0, None), RankPlace(1, "GPU-x"))


def cut(source: WeightSource, limit: int) -> tuple[ChunkPlan, ...]:
    return source.plan(PushWish(chunk_bytes_max=limit)).chunks


def entries(
    source: WeightSource, chunk: ChunkPlan, ranks: tuple[RankPlace, ...] = RANKS
) -> tuple[bytes, ...]:
    return source.offer(chunk, Target("s", ranks)).entries


@pytest.fixture(name="tiny", scope="module")
def _tiny(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0)


def test_chunks_together_are_the_checkpoint(tiny: Path) -> None:
    """The payloads of all chunks, read in order, are the tensors of the checkpoint."""
    folder = CheckpointFolder.open(tiny)
    source: WeightSource = CheckpointSource(folder)
    found = [item for chunk in cut(source, 100_000) for item in read(entries(source, chunk)[0])]
    assert [name for name, _ in found] == [spec.name for spec in source.manifest.tensors]
    for name, tensor in found:
        assert tensor.storage.data == folder.tensor(name)
    source.close()


def test_one_entry_for_each_rank(tiny: Path) -> None:
    """Every rank has an entry, and all are the same bytes."""
    source = CheckpointSource(CheckpointFolder.open(tiny))
    chunk = cut(source, 1 << 30)[0]
    first, second = entries(source, chunk)
    assert first is second
    assert entries(source, chunk, ()) == ()


def test_servers_share_an_encoding(tiny: Path) -> None:
    """The next server gets the same encoded chunk, and an earlier chunk asked again is encoded right."""
    source = CheckpointSource(CheckpointFolder.open(tiny))
    one, two, *_ = cut(source, 50_000)
    (first,) = entries(source, one, RANKS[:1])
    assert entries(source, one, RANKS[:1])[0] is first
    (second,) = entries(source, two, RANKS[:1])
    assert [name for name, _ in read(second)] == list(two.names)
    assert entries(source, one, RANKS[:1]) == (first,)


def test_closed_source_gives_nothing(tiny: Path) -> None:
    """After closing, payloads are refused, also those given before."""
    source = CheckpointSource(CheckpointFolder.open(tiny))
    chunk = cut(source, 1 << 30)[0]
    entries(source, chunk)
    source.close()
    source.close()
    with pytest.raises(WeightsError, match="was closed"):
        entries(source, chunk)


@pytest.mark.parametrize("strategy", [Strategy.BUCKET, Strategy.MIXED, Strategy.REGISTERED])
def test_a_folder_has_no_memory_to_lend(tiny: Path, strategy: Strategy) -> None:
    """A way of pushing that lends memory is refused before the first push, with the remedy."""
    source = CheckpointSource(CheckpointFolder.open(tiny))
    with pytest.raises(WeightsError, match=f"push_strategy = {strategy} needs weights in memory: use list"):
        source.plan(PushWish(strategy))


def test_one_push_a_tensor_for_comparison(tiny: Path) -> None:
    """`tensor` is one push for each tensor."""
    source = CheckpointSource(CheckpointFolder.open(tiny))
    assert len(source.plan(PushWish(Strategy.TENSOR)).chunks) == len(source.manifest.tensors)


def test_checkpoint_that_cannot_be_sent_is_refused_at_once(tmp_path: Path) -> None:
    """A tensor without elements is found before the first push."""
    write_safetensors(tmp_path / "model.safetensors", {"a": ("F32", (0,), b""), "b": ("F32", (1,), b"1234")})
    with pytest.raises(WeightsError, match=r"'a' of shape \[0\] has no elements"):
        CheckpointSource(CheckpointFolder.open(tmp_path))


def test_tiny_checkpoint_is_the_same_everywhere(tmp_path: Path, tiny: Path) -> None:
    """A seed always gives the same file, and another seed another one of the same manifest."""
    again = tiny_checkpoint(tmp_path / "again", seed=0)
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    data = (tiny / "model.safetensors").read_bytes()
    assert data == (again / "model.safetensors").read_bytes()
    assert data != (other / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == TINY_SEED_0
    assert CheckpointFolder.open(tiny).manifest == CheckpointFolder.open(other).manifest


def test_tiny_checkpoint_is_the_model_of_its_config(tiny: Path) -> None:
    """Shapes follow the config, norms are 1, and the rest is small and centred on 0."""
    config = json.loads((tiny / "config.json").read_text())
    with CheckpointFolder.open(tiny) as folder:
        by_name = folder.manifest.by_name
        assert len(by_name) == 3 + 9 * config["num_hidden_layers"]
        assert by_name["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
        assert folder.manifest.nbytes == 4 * 139_584
        for spec in folder.manifest.tensors:
            count = spec.nbytes // 4
            values = struct.unpack(f"<{count}f", folder.tensor(spec.name))
            if "norm" in spec.name:
                assert set(values) == {1.0}
                continue
            deviation = (sum(value * value for value in values) / count) ** 0.5
            assert deviation == pytest.approx(spec.shape[1] ** -0.5, rel=0.05)
            assert abs(sum(values) / count) < 0.01


def test_nothing_here_imports_torch() -> None:
    """All of the package imports without torch and without SGLang, but the kernel, which is Triton's."""
    modules = sorted(file.stem for file in Path(weights.__file__).parent.glob("[!_]*.py"))
    assert "torch_source" in modules
    modules = [module for module in modules if module != "hash_kernel"]
    program = "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\n" + "".join(
        f"import refitfsm.weights.{module}\n" for module in modules
    )
    subprocess.run([sys.executable, "-c", program], check=True)
