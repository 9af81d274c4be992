import json
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitfsm.weights.dtypes import DTYPES, size_bytes
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.files import write_safetensors
from refitfsm.weights.headers import parse_header
from refitfsm.weights.safetensors import INDEX_NAME, CheckpointFolder

ONE = {"a": ("F32", (2,), b"12345678")}
TWO = {"b": ("U8", (3,), b"abc")}
A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw_file(header: object, data: bytes = b"\0" * 8) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def two_files(folder: Path) -> None:
    write_safetensors(folder / "model-1.safetensors", ONE)
    write_safetensors(folder / "model-2.safetensors", TWO)


tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3).map(lambda s: (*s, 8))
    ),
    max_size=6,
)


@given(tensors)
def test_written_files_are_read_back(tmp_path_factory, kinds) -> None:
    """A written file is read back tensor by tensor, its data aligned to its elements."""
    given_tensors = {
        name: (dtype, shape, bytes(i % 251 for i in range(size_bytes(dtype, shape))))
        for name, (dtype, shape) in kinds.items()
    }
    folder = tmp_path_factory.mktemp("checkpoint")
    write_safetensors(folder / "model.safetensors", given_tensors)
    with CheckpointFolder.open(folder) as checkpoint:
        assert checkpoint.manifest.by_name.keys() == given_tensors.keys()
        for spec in checkpoint.manifest.tensors:
            assert (spec.dtype, spec.shape, bytes(checkpoint.tensor(spec.name))) == given_tensors[spec.name]
    data = (folder / "model.safetensors").read_bytes()
    start, entries = parse_header(folder, memoryview(data))
    assert all((start + entry.begin) % max(1, DTYPES[entry.spec.dtype].bits // 8) == 0 for entry in entries)


def test_folder_without_index_is_all_its_files(tmp_path: Path) -> None:
    """Without an index, every safetensors file of the folder counts, in order of name."""
    two_files(tmp_path)
    with CheckpointFolder.open(tmp_path) as checkpoint:
        assert [spec.name for spec in checkpoint.manifest.tensors] == ["a", "b"]
        assert bytes(checkpoint.tensor("b")) == b"abc"


def test_index_chooses_the_files(tmp_path: Path) -> None:
    """With an index, files that it does not name are ignored."""
    two_files(tmp_path)
    write_safetensors(tmp_path / "consolidated.safetensors", ONE)
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with CheckpointFolder.open(tmp_path) as checkpoint:
        assert [spec.name for spec in checkpoint.manifest.tensors] == ["a", "b"]


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "model-1.safetensors", "b": "model-3.safetensors"}, "names 'model-3.safetensors'"),
        ({"a": "../model-1.safetensors"}, "which is not in the folder"),
        ({"a": "model-1.safetensors", "c": "model-2.safetensors"}, "tensor '[bc]' is listed in"),
        (
            {"a": "model-2.safetensors", "b": "model-2.safetensors"},
            "tensor 'a' is listed in .* found in none",
        ),
        ({"a": "model-1.safetensors", "c": "model-1.safetensors"}, "tensor 'c' is listed in"),
        ({"a": 1}, "tensor 'a' has no file name"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_index_that_disagrees_is_refused(tmp_path: Path, weight_map: object, reason: str) -> None:
    """An index must name files that exist, and exactly the tensors in them."""
    two_files(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(WeightsError, match=reason):
        CheckpointFolder.open(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Which of two tensors of a name is meant cannot be known."""
    two_files(tmp_path)
    write_safetensors(tmp_path / "model-3.safetensors", TWO)
    with pytest.raises(WeightsError, match=r"model-3.safetensors: tensor 'b' is also in model-2.safetensors"):
        CheckpointFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (b"1234567", "only 7 bytes long"),
        (struct.pack("<Q", 1 << 60), "no safetensors file"),
        (raw_file({"a": A})[:20], "cut short within its header"),
        (raw_file(b"{not json"), "is not JSON"),
        (raw_file(b"\xff\xfe{}"), "is not JSON"),
        (raw_file(b"[" * 100_000), "is not JSON"),
        (raw_file([1]), "holds no JSON object"),
        (raw_file(b'{"a": {}, "a": {}}'), "'a' is given twice"),
        (raw_file({"a": A}, b"\0" * 7), "tensor 'a' ends at byte 8 of the data, and there are 7"),
        (raw_file({"a": A}, b"\0" * 9), "1 bytes belong to no tensor"),
        (raw_file({"a": {**A, "shape": [3]}}), "tensor 'a' has 8 bytes, and F32 .3. takes 12"),
        (raw_file({"a": {**A, "dtype": "F99"}}), "tensor 'a': unknown number format 'F99'"),
        (raw_file({"a": {**A, "dtype": 4}}), "no proper dtype"),
        (raw_file({"a": {**A, "shape": [2.0]}}), "no proper dtype"),
        (raw_file({"a": {**A, "shape": [True, 2]}}), "no proper dtype"),
        (raw_file({"a": {**A, "shape": [-2]}}), "negative dimension"),
        (raw_file({"a": {**A, "data_offsets": [8, 0]}}), "no proper dtype"),
        (raw_file({"a": {**A, "data_offsets": [-8, 0]}}), "no proper dtype"),
        (raw_file({"a": {**A, "data_offsets": [0]}}), "no proper dtype"),
        (raw_file({"a": []}), "no proper dtype"),
        (raw_file({"a": A, "b": {**A, "data_offsets": [4, 12]}}, b"\0" * 12), "tensor 'b' overlaps"),
        (raw_file({"a": {**A, "data_offsets": [4, 12]}}, b"\0" * 12), "tensor 'a' leaves a gap"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """A file that departs from the format is refused at opening, in one line that names it."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=reason) as caught:
        CheckpointFolder.open(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "model.safetensors"))
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    """Whatever the bytes, the answer is a header or a `WeightsError`."""
    with suppress(WeightsError):
        parse_header(Path("file"), memoryview(data))


@given(st.integers(0, 130), st.integers(0, 255))
def test_no_flipped_byte_breaks_the_reader(position: int, value: int) -> None:
    """A changed byte gives another good header or a `WeightsError`, never another error."""
    data = bytearray(
        raw_file({"a": A, "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]}}, b"\0" * 11)
    )
    data[position % len(data)] = value
    with suppress(WeightsError):
        parse_header(Path("file"), memoryview(data))


def test_missing_things_are_named(tmp_path: Path) -> None:
    """A missing folder, a file for a folder, no file, an unknown tensor: each has its own error."""
    with pytest.raises(WeightsError, match="does not exist"):
        CheckpointFolder.open(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors file"):
        CheckpointFolder.open(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", ONE)
    with pytest.raises(WeightsError, match="give the folder it is in"):
        CheckpointFolder.open(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="no tensor 'b'"):
        CheckpointFolder.open(tmp_path).tensor("b")


def test_closing_keeps_views_and_refuses_new_ones(tmp_path: Path) -> None:
    """A closed folder gives no tensor; what it gave before stays readable. Closing twice is closing once."""
    write_safetensors(tmp_path / "model.safetensors", ONE)
    checkpoint = CheckpointFolder.open(tmp_path)
    view = checkpoint.tensor("a")
    checkpoint.close()
    checkpoint.close()
    assert bytes(view) == b"12345678"
    assert view.readonly
    with pytest.raises(WeightsError, match="was closed"):
        checkpoint.tensor("a")


def test_writer_refuses_wrong_sizes(tmp_path: Path) -> None:
    """A tensor whose bytes do not fit its shape is not written."""
    with pytest.raises(WeightsError, match=r"'a': 7 bytes do not fit F32 \[2\]"):
        write_safetensors(tmp_path / "model.safetensors", {"a": ("F32", (2,), b"1234567")})
    assert not (tmp_path / "model.safetensors").exists()
