"""Reading a folder of safetensors files: checked whole at opening, its data only mapped."""

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.headers import Entry, decode_object, parse_header
from refitfsm.weights.manifest import Manifest

INDEX_NAME = "model.safetensors.index.json"


class _Place(NamedTuple):
    file: "_MappedFile"
    begin: int
    end: int


class CheckpointFolder:
    """A folder of `*.safetensors` files as one set of named tensors.

    With `model.safetensors.index.json` present, the files are those that it names; otherwise all in the
    folder. Tensors keep the order of their data, file after file in order of file name. The files must
    not be changed while the folder is open.
    """

    def __init__(self, files: Iterable["_MappedFile"]) -> None:
        self._files = tuple(files)
        self._places: dict[str, _Place] = {}
        for file in self._files:
            for entry in file.entries:
                self._place(entry, file)
        self.manifest = Manifest(tuple(entry.spec for file in self._files for entry in file.entries))

    def _place(self, entry: Entry, file: "_MappedFile") -> None:
        name = entry.spec.name
        other = self._places.get(name)
        if other is not None:
            raise WeightsError(
                f"{file.path}: tensor {name!r} is also in {other.file.path.name}: one checkpoint a folder"
            )
        self._places[name] = _Place(file, entry.begin, entry.end)

    @classmethod
    def open(cls, path: str | Path) -> "CheckpointFolder":
        """Map and check every file. No tensor data is read.

        Raises:
            WeightsError: the folder, a file, a header or the index is missing, damaged or contradictory.
        """
        folder = Path(path)
        if not folder.is_dir():
            reason = (
                "is a file: give the folder it is in"
                if folder.is_file()
                else "does not exist: give the folder of a safetensors checkpoint"
            )
            raise WeightsError(f"checkpoint folder {folder} {reason}")
        index = folder / INDEX_NAME
        if index.is_file():
            return _open_indexed(folder, index)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{folder} holds no *.safetensors file: convert the checkpoint to safetensors")
        return cls(_MappedFile(file) for file in files)

    def tensor(self, name: str) -> memoryview:
        """The bytes of one tensor, read-only, row-major, little-endian. Not copied.

        Raises:
            WeightsError: the checkpoint has no such tensor, or is closed.
        """
        place = self._places.get(name)
        if place is None:
            raise WeightsError(f"the checkpoint has no tensor {name!r}: take names from its manifest")
        return place.file.view(place.begin, place.end)

    def require_open(self) -> None:
        """Whether its tensors can be read.

        Raises:
            WeightsError: it was closed.
        """
        for file in self._files:
            file.view(0, 0)

    def close(self) -> None:
        """Let go of the files. Idempotent; views handed out before stay valid."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _MappedFile:
    """One safetensors file in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data: memoryview | None = memoryview(
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                )
        except (OSError, ValueError) as error:  # mapping an empty file is a ValueError
            raise WeightsError(f"{path}: cannot be read ({error}): copy the checkpoint again") from None
        self._start, self.entries = parse_header(path, self._data)

    def view(self, begin: int, end: int) -> memoryview:
        if self._data is None:
            raise WeightsError(f"{self.path} was closed: open the checkpoint again")
        return self._data[self._start + begin : self._start + end]

    def close(self) -> None:
        # The mapping itself goes when the last view of it does.
        self._data = None


def _open_indexed(folder: Path, index: Path) -> CheckpointFolder:
    weight_map = _weight_map(index)
    checkpoint = CheckpointFolder(_indexed_files(folder, index, set(weight_map.values())))
    found = {name: place.file.path.name for name, place in checkpoint._places.items()}  # noqa: SLF001
    for name in weight_map.keys() | found.keys():
        if weight_map.get(name) != found.get(name):
            checkpoint.close()
            raise WeightsError(
                f"{index}: tensor {name!r} is listed in {weight_map.get(name, 'no file')} and found in"
                f" {found.get(name, 'none')}: write the index again or copy the checkpoint again"
            )
    return checkpoint


def _indexed_files(folder: Path, index: Path, names: set[str]) -> Iterator[_MappedFile]:
    for name in sorted(names):
        if Path(name).name != name or not (folder / name).is_file():
            raise WeightsError(
                f"{index} names {name!r}, which is not in the folder: copy the checkpoint again"
            )
        yield _MappedFile(folder / name)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        raw = index.read_bytes()
    except OSError as error:
        raise WeightsError(f"{index}: cannot be read ({error}): copy the checkpoint again") from None
    weight_map = decode_object(index, raw).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index} has no weight_map: write the index again")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise WeightsError(f"{index}: tensor {name!r} has no file name: write the index again")
    return weight_map
