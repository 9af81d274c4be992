"""A sample of what a server holds: the first values of a few tensors, beside those of the source.

SGLang reads a tensor back by the name it has in the checkpoint, where the model's code can: that of Llama
can, and of what is built on it, of few others. It answers with the first rows as rank 0 has them, in float32.
On the way it makes numbers of the whole tensor, so only tensors of a moderate size are asked for.

Where a part lies in a joined tensor SGLang computes from the model's config, and not for all models rightly.
Such a part is left out: a wrong guess would accuse a server that is right.
"""

import math
import struct
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.proof import Comparison, some
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource, WeightSource

SAMPLES = 8
"""How many tensors are read back at most."""
ELEMENTS_MAX = 1 << 24
"""Elements of a tensor that is read back: the server turns each into a Python number first."""
COLUMNS_MAX = 1 << 16
"""Values in an answer about a matrix: its first row."""
VECTOR_MAX = 1 << 10
"""Values in an answer about a vector."""

Value = float | None
"""A number, or None for what JSON has no number for: NaN and the infinities."""


@runtime_checkable
class ShowsValues(Protocol):
    """A weight source that can say what its tensors begin with."""

    def head(self, name: str, count: int) -> tuple[float, ...]:
        """The first `count` values of a tensor, row by row, as they are now.

        Raises:
            WeightsError: there is no such tensor, or its values are no plain numbers.
        """
        ...


class Sample(NamedTuple):
    """One tensor to be read back."""

    name: str
    rows: int
    """How many rows are asked for; of a vector each value is one."""
    size: int
    """How many values that is, at most."""
    is_vector: bool


class Readback(NamedTuple):
    """What a server reads back, beside what was pushed. By the names that were pushed."""

    held: tuple[str, ...]
    """These begin with the values that were pushed."""
    differing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    """The server was asked for these, and could not read them back."""

    def words(self, count: int) -> str:
        """In one line, of the `count` tensors that it was chosen from."""
        if self.differing:
            return f"{some(self.differing)} differ from what was pushed"
        unread = f", {some(self.unread)} cannot be read back" if self.unread else ""
        return f"{len(self.held)} of {count} tensors were read back, as they were pushed{unread}"


def proved_words(compared: Comparison, read: Readback | str) -> str:
    """In one line, what checksums cover, what was read back, and what is neither.

    Args:
        read: of the tensors that no checksum covers; or why none was read back.
    """
    if isinstance(read, str):
        return f"{compared.words}; {some(compared.uncovered)} neither, {read}"
    neither = [name for name in compared.uncovered if name not in read.held]
    left = f"; {some(neither)} neither" if neither else ""
    return f"{compared.words}; {len(read.held)} others were read back, as they were pushed{left}"


def shown(source: WeightSource) -> ShowsValues | None:
    """How the values of a source can be seen; None if they cannot."""
    if isinstance(source, ShowsValues):
        return source
    if isinstance(source, CheckpointSource):
        return _FolderValues(source._folder, source.manifest)  # noqa: SLF001 - of this package
    return None


def choose(
    manifest: Manifest, among: Collection[str], *, tp_size: int = 1, on_cpu: bool = False
) -> tuple[Sample, ...]:
    """The tensors to be read back: at most `SAMPLES`, always the same, spread evenly from first to last.

    Args:
        manifest: all that is pushed; it tells what the server makes of a tensor.
        among: the names to choose from.
        tp_size: the server's tensor parallel ranks.
        on_cpu: the server computes on the CPU, where it pads more.
    """
    judge = _Judge(manifest, tp_size, on_cpu)
    fit = [spec for spec in manifest.tensors if spec.name in among and judge.fits(spec)]
    matrices = [spec for spec in fit if len(spec.shape) == 2]
    pool = matrices or fit  # a norm is often all ones, before training and after
    count = min(SAMPLES, len(pool))
    places = [at * (len(pool) - 1) // max(1, count - 1) for at in range(count)]
    return tuple(_sample(pool[at]) for at in places)


def is_same(sample: Sample, sent: Sequence[float], read: Sequence[Value]) -> bool | None:
    """Whether a server's values are those of the source, in one of the number formats a server holds.

    They are compared exactly. None if the answer is not the tensor's beginning: of another length than its
    first row, or empty, as a rank without a share of it answers.
    """
    if not read or len(read) > len(sent) or (not sample.is_vector and len(read) != len(sent)):
        return None
    return any(all(map(_equal, map(held, sent), read)) for held in _HELD)


def _sample(spec: TensorSpec) -> Sample:
    if len(spec.shape) == 1:
        count = min(spec.shape[0], VECTOR_MAX)
        return Sample(spec.name, count, count, is_vector=True)
    return Sample(spec.name, 1, spec.shape[1], is_vector=False)


class _Judge:
    """Tells of which tensors it is certain what the server would read back."""

    def __init__(self, manifest: Manifest, tp_size: int, on_cpu: bool) -> None:
        self.specs = manifest.by_name
        self.tp_size = tp_size
        self.on_cpu = on_cpu
        self.odd = {_module(name) for name in self.specs if _kind(name) not in ("weight", "bias")}
        ups = (spec for name, spec in self.specs.items() if name.endswith(f"{_UP}.weight"))
        self.up_rows = {spec.shape[0] for spec in ups if spec.shape}

    def fits(self, spec: TensorSpec) -> bool:
        size = len(spec.shape)
        if spec.dtype not in _FORMATS or size not in (1, 2) or not math.prod(spec.shape):
            return False
        if math.prod(spec.shape) > ELEMENTS_MAX or (size == 2 and spec.shape[1] > COLUMNS_MAX):
            return False
        return _module(spec.name) not in self.odd and self._is_certain(spec.name)

    def _is_certain(self, name: str) -> bool:
        """Whether SGLang finds it, finds it where it is, and asks no other rank for it."""
        module = _module(name)
        part = module.rpartition(".")[2]
        if ".experts." in name or (self.tp_size > 1 and part in ("o_proj", "down_proj")):
            return False  # those it has no names for; these it would gather, in a group unused so far
        if part in ("k_proj", "v_proj"):
            q = self.specs.get(f"{_module(module)}.q_proj.weight")
            square = q is not None and len(set(q.shape)) == 1  # a head is hidden size / heads, as it assumes
            return square and not (self.on_cpu and self.tp_size > 1)
        if part == "up_proj":
            padded = self.on_cpu and any(rows % (_CPU_ROWS * self.tp_size) for rows in self.up_rows)
            return module.endswith(_UP) and len(self.up_rows) == 1 and not padded
        return True


class _FolderValues:
    """The values of a safetensors folder."""

    def __init__(self, folder: CheckpointFolder, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def head(self, name: str, count: int) -> tuple[float, ...]:
        """See `ShowsValues.head`."""
        data = self._folder.tensor(name)
        return values_of(self._manifest.by_name[name].dtype, data, count)


def values_of(dtype: str, data: bytes | memoryview, count: int) -> tuple[float, ...]:
    """The first `count` numbers of a tensor's bytes, little-endian.

    Raises:
        WeightsError: the number format is none of F32, F16 and BF16.
    """
    if dtype not in _FORMATS:
        raise WeightsError(f"{dtype} has no plain numbers to compare: read back F32, F16 or BF16 tensors")
    size, code = _FORMATS[dtype]
    raw = bytes(data[: count * size])
    if dtype == "BF16":
        raw = b"".join(b"\0\0" + raw[at : at + 2] for at in range(0, len(raw), 2))
    return struct.unpack(f"<{min(count, len(data) // size)}{code}", raw)


def _equal(sent: float, read: Value) -> bool:
    return not math.isfinite(sent) if read is None else sent == read


def _as_bf16(value: float) -> float:
    """Rounded to the nearest, ties to even, as torch does."""
    if not math.isfinite(value):
        return value
    (bits,) = struct.unpack("<I", struct.pack("<f", _as_f32(value)))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


def _as_f32(value: float) -> float:
    return _through("<f", value)


def _as_f16(value: float) -> float:
    return _through("<e", value)


def _through(code: str, value: float) -> float:
    try:
        return float(struct.unpack(code, struct.pack(code, value))[0])
    except OverflowError:  # too large for the format
        return math.copysign(math.inf, value)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


_FORMATS = {"F32": (4, "f"), "F16": (2, "e"), "BF16": (2, "f")}
"""Bytes of an element, and how struct reads it."""
_HELD: tuple[Callable[[float], float], ...] = (_as_f32, _as_bf16, _as_f16)
"""What becomes of a value in each of the formats that a server may hold it in."""
_UP = ".mlp.up_proj"
_CPU_ROWS = 32
"""On the CPU a rank's share of an MLP is padded to a multiple of this."""
