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
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource, RankPlace, WeightSource

TINY_SEED_0 = "505183b93048f44e074ac1cf0e13238f5bff845538e854322cc693cd3947d3de"
RANKS = (RankPlace(0, None), RankPlace(1, "GPU-x"))


@pytest.fixture(name="tiny", scope="module")
def _tiny(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0)


def test_chunks_together_are_the_checkpoint(tiny: Path) -> None:
    """The payloads of all chunks, read in order, are the tensors of the checkpoint."""
    folder = CheckpointFolder.open(tiny)
    source: WeightSource = CheckpointSource(folder)
    found = [item for chunk in source.chunks(100_000) for item in read(source.payloads(chunk, RANKS)[0])]
    assert [name for name, _ in found] == [spec.name for spec in source.manifest.tensors]
    for name, tensor in found:
        assert tensor.storage.data == folder.tensor(name)
    assert source.load_format is None
    source.close()


def test_one_entry_for_each_rank(tiny: Path) -> None:
    """Every rank has an entry, and all are the same bytes."""
    source = CheckpointSource(CheckpointFolder.open(tiny))
    chunk = source.chunks(1 << 30)[0]
    first, second = source.payloads(chunk, RANKS)
    assert first is second
    assert source.payloads(chunk, ()) == ()


def test_servers_share_an_encoding(tiny: Path) -> None:
    """The next server gets the same encoded chunk, and an earlier chunk asked again is encoded right."""
    source = CheckpointSource(CheckpointFolder.open(tiny))
    one, two, *_ = source.chunks(50_000)
    (first,) = source.payloads(one, RANKS[:1])
    assert source.payloads(one, RANKS[:1])[0] is first
    (second,) = source.payloads(two, RANKS[:1])
    assert [name for name, _ in read(second)] == list(two.names)
    assert source.payloads(one, RANKS[:1]) == (first,)


def test_closed_source_gives_nothing(tiny: Path) -> None:
    """After closing, payloads are refused, also those given before."""
    source = CheckpointSource(CheckpointFolder.open(tiny))
    chunk = source.chunks(1 << 30)[0]
    source.payloads(chunk, RANKS)
    source.close()
    source.close()
    with pytest.raises(WeightsError, match="was closed"):
        source.payloads(chunk, RANKS)


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
    """All of the package imports without torch and without SGLang."""
    modules = sorted(file.stem for file in Path(weights.__file__).parent.glob("[!_]*.py"))
    assert "torch_source" in modules
    program = "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\n" + "".join(
        f"import refitfsm.weights.{module}\n" for module in modules
    )
    subprocess.run([sys.executable, "-c", program], check=True)
