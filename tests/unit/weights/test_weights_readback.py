"""What is read back of a server: which tensors, how values are compared, and what is said of it."""

import itertools
import math
import struct
from pathlib import Path

import pytest

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.files import tiny_checkpoint
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.proof import Comparison
from refitfsm.weights.readback import (
    ELEMENTS_MAX,
    SAMPLES,
    Readback,
    Sample,
    choose,
    is_same,
    proved_words,
    shown,
    values_of,
)
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource

LAYER = "model.layers.0"
VECTOR, MATRIX = Sample("v", 4, 4, is_vector=True), Sample("m", 1, 4, is_vector=False)
SENT = (1.0, -2.5, 0.0, 1 / 3)


def manifest(**shapes: tuple[int, ...]) -> Manifest:
    """Of BF16 tensors; `__` in a name stands for a dot."""
    specs = (TensorSpec.of(name.replace("__", "."), "BF16", shape) for name, shape in shapes.items())
    return Manifest(tuple(specs))


def chosen(given: Manifest, **server: int) -> list[str]:
    return [sample.name for sample in choose(given, given.by_name, **server)]  # type: ignore[arg-type]


def attention(query_rows: int, hidden: int) -> Manifest:
    shapes = {"q": query_rows, "k": 16, "v": 16, "o": hidden}
    at = f"{LAYER}.self_attn".replace(".", "__")
    return manifest(**{f"{at}__{part}_proj__weight": (rows, hidden) for part, rows in shapes.items()})


def parts(names: list[str]) -> list[str]:
    return [name.split(".")[-2].removesuffix("_proj") for name in names]


@pytest.mark.parametrize("count", [1, 2, SAMPLES, SAMPLES + 1, 100])
def test_a_bounded_number_is_spread_from_first_to_last(count: int) -> None:
    """Always the same, each once, the first and the last among them."""
    given = manifest(**{f"t{at}__weight": (2, 3) for at in range(count)})
    names = chosen(given)
    assert names == chosen(given)
    assert len(set(names)) == len(names) == min(count, SAMPLES)
    assert (names[0], names[-1]) == ("t0.weight", f"t{count - 1}.weight")
    gaps = {int(b[1:-7]) - int(a[1:-7]) for a, b in itertools.pairwise(names)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_only_what_is_asked_for_is_chosen() -> None:
    """The rest of the manifest only tells what the server makes of it."""
    given = manifest(a__weight=(2, 3), b__weight=(2, 3))
    assert [sample.name for sample in choose(given, ["b.weight", "c"])] == ["b.weight"]
    assert choose(given, []) == ()


def test_matrices_come_before_vectors() -> None:
    """A norm is often all ones whatever was pushed, so it is read only where there is nothing else."""
    norm = {"model__norm__weight": (5000,)}
    assert chosen(manifest(**norm, a__weight=(2, 3))) == ["a.weight"]
    given = manifest(**norm)
    assert choose(given, given.by_name) == (Sample("model.norm.weight", 1024, 1024, is_vector=True),)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("a.weight", "I32", (2, 3)),
        ("a.weight", "F8_E4M3", (2, 3)),
        ("a.weight", "BF16", (2, 3, 4)),
        ("a.weight", "BF16", ()),
        ("a.weight", "BF16", (0, 3)),
        ("a.weight", "BF16", (ELEMENTS_MAX + 1,)),
        ("a.weight", "BF16", (1, 1 << 17)),
        ("a.weight_scale", "F32", (2, 3)),
        (f"{LAYER}.mlp.experts.3.down_proj.weight", "BF16", (2, 3)),
    ],
)
def test_what_cannot_be_compared_is_not_asked_for(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Other formats than plain floats, other shapes than rows, too much of it, and names SGLang lacks."""
    assert chosen(Manifest((TensorSpec.of(name, dtype, shape),))) == []


def test_a_quantised_module_is_not_asked_for() -> None:
    """Beside a scale, the weight is not what was pushed, whatever its format."""
    assert chosen(manifest(a__weight=(2, 3), a__weight_scale=(2,), b__weight=(2, 3))) == ["b.weight"]


def test_parts_of_a_joined_tensor_are_asked_for_where_sglang_finds_them() -> None:
    """It takes a head for hidden size / heads: k and v lie elsewhere where a head is of another size."""
    assert parts(chosen(attention(64, 64))) == ["q", "k", "v", "o"]
    assert parts(chosen(attention(128, 64))) == ["q", "o"]
    assert parts(chosen(attention(64, 64), tp_size=2)) == ["q", "k", "v"]  # o would be gathered
    assert parts(chosen(attention(64, 64), tp_size=2, on_cpu=True)) == ["q"]


def test_the_second_half_of_an_mlp_is_asked_for_where_all_are_alike() -> None:
    """It is found by one size for all layers; on the CPU that size may have been padded."""
    gate, up = (f"model__layers__0__mlp__{part}_proj__weight" for part in ("gate", "up"))
    other = "model__layers__1__mlp__up_proj__weight"
    assert parts(chosen(manifest(**{gate: (96, 8), up: (96, 8)}))) == ["gate", "up"]
    assert parts(chosen(manifest(**{gate: (96, 8), up: (96, 8), other: (64, 8)}))) == ["gate"]
    assert parts(chosen(manifest(**{gate: (96, 8), up: (96, 8)}), tp_size=2, on_cpu=True)) == ["gate"]
    assert chosen(manifest(model__layers__0__mlp__shared_expert__up_proj__weight=(96, 8))) == []


def held(code: str) -> tuple[float, ...]:
    """What a server has that holds `SENT` in a format: BF16 by cutting, which is exact for these but 1/3."""
    if code == "bf16":
        return (1.0, -2.5, 0.0, 0.333984375)
    return struct.unpack(f"<4{code}", struct.pack(f"<4{code}", *SENT))


@pytest.mark.parametrize("code", ["f", "e", "bf16"])
def test_values_are_equal_in_the_servers_format(code: str) -> None:
    """A server that holds fewer digits has the nearest values, and nothing else is equal."""
    assert is_same(MATRIX, SENT, held(code)) is True
    assert is_same(MATRIX, SENT, (*held(code)[:3], math.nextafter(held(code)[3], 1))) is False


def test_one_format_is_meant_for_all_values() -> None:
    """Values that are right each in another format are wrong together."""
    third = 1 / 3
    assert is_same(VECTOR, (third, third), (held("f")[3], held("bf16")[3])) is False


def test_what_json_cannot_say_is_not_finite() -> None:
    """NaN and the infinities come back as null; a number for them, or null for a number, differs."""
    odd = (math.nan, math.inf, -math.inf, 1.0)
    assert is_same(MATRIX, odd, (None, None, None, 1.0)) is True
    assert is_same(MATRIX, odd, (None, None, None, None)) is False
    assert is_same(MATRIX, odd, (None, None, 1.0, 1.0)) is False
    assert is_same(MATRIX, (1e30,) * 4, (None,) * 4) is True  # a server that holds half precision


@pytest.mark.parametrize(
    ("sample", "read"), [(MATRIX, SENT[:3]), (MATRIX, (*SENT, 1.0)), (VECTOR, (*SENT, 1.0)), (VECTOR, ())]
)
def test_an_answer_of_another_length_accuses_nobody(sample: Sample, read: tuple[float, ...]) -> None:
    """It is not the beginning that was asked for; a vector's share may be shorter."""
    assert is_same(sample, SENT, read) is None
    assert is_same(VECTOR, SENT, SENT[:2]) is True


def test_bytes_become_numbers() -> None:
    """Of each format that is read back, the first values, as many as there are."""
    assert values_of("F32", struct.pack("<3f", 1, -2, 3), 2) == (1, -2)
    assert values_of("F16", struct.pack("<3e", 1, -2, 3), 9) == (1, -2, 3)
    assert values_of("BF16", b"\x80\x3f\x20\xc0", 2) == (1, -2.5)
    with pytest.raises(WeightsError, match="I8 has no plain numbers"):
        values_of("I8", b"12", 1)


def test_a_folder_shows_its_values(tmp_path: Path) -> None:
    """A checkpoint's source is one whose values can be seen."""
    folder = CheckpointFolder.open(tiny_checkpoint(tmp_path, 3))
    values = shown(CheckpointSource(folder))
    assert values is not None
    name = "lm_head.weight"
    assert values.head(name, 64) == struct.unpack("<64f", folder.tensor(name)[:256])
    folder.close()


def test_a_readback_in_words() -> None:
    """What differs is named; else how many of how many were read, and what could not be."""
    assert Readback(("a",), ("b",)).words(9) == "b differ from what was pushed"
    assert Readback(("a", "b"), (), ("c",)).words(9) == (
        "2 of 9 tensors were read back, as they were pushed, c cannot be read back"
    )


def test_a_proof_in_words() -> None:
    """Three counts: compared by checksum, read back, and the names of what is neither."""
    compared = Comparison((), ("x",), 7, ("a", "b", "c"))
    said = proved_words(compared, Readback(("a", "b"), (), ("c",)))
    assert said.startswith("7 tensors have the checksums of what was pushed, x not compared; ")
    assert said.endswith("2 others were read back, as they were pushed; c neither")
    assert proved_words(compared, "it cannot").endswith("a, b, c neither, it cannot")
