"""What a set of weights consists of: names, number formats and shapes, without the values."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from refitfsm.weights.dtypes import size_bytes
from refitfsm.weights.errors import WeightsError


class TensorSpec(NamedTuple):
    """One tensor without its values."""

    name: str
    dtype: str
    """Safetensors spelling: F32, BF16, I8, F8_E4M3 ..."""
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...]) -> "TensorSpec":
        """A spec whose size in bytes follows from dtype and shape.

        Raises:
            WeightsError: the dtype is unknown or the shape impossible.
        """
        try:
            return cls(name, dtype, shape, size_bytes(dtype, shape))
        except WeightsError as error:
            raise WeightsError(f"tensor {name!r}: {error}") from None


class Difference(NamedTuple):
    """One way in which a manifest is not the expected one."""

    name: str
    kind: Literal["missing", "unexpected", "shape", "dtype"]
    found: str
    expected: str

    def __str__(self) -> str:
        match self.kind:
            case "missing":
                return f"Tensor {self.name!r} is missing: {self.expected} was expected."
            case "unexpected":
                return f"Tensor {self.name!r} was not expected: it is {self.found}."
            case _:
                return f"Tensor {self.name!r} has {self.kind} {self.found}, and {self.expected} was expected."


@dataclass(frozen=True)
class Manifest:
    """An ordered set of tensor specs, each name once.

    Raises:
        WeightsError: two tensors have the same name.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if len(self.by_name) == len(self.tensors):
            return
        seen: set[str] = set()
        for spec in self.tensors:
            if spec.name in seen:
                raise WeightsError(f"tensor {spec.name!r} is given twice: give each name once")
            seen.add(spec.name)

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """Each spec under its name. Do not change it."""
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over names, dtypes and shapes. The order of the tensors does not matter."""
        entries = sorted((spec.name, spec.dtype, spec.shape) for spec in self.tensors)
        return hashlib.sha256(json.dumps(entries, separators=(",", ":")).encode()).hexdigest()

    def differences(self, expected: "Manifest") -> tuple[Difference, ...]:
        """How this manifest departs from `expected`, in the order of `expected`, unexpected ones last.

        Empty if and only if the digests are equal.
        """
        return (*self._departures(expected), *self._extras(expected))

    def _departures(self, expected: "Manifest") -> Iterator[Difference]:
        for wanted in expected.tensors:
            found = self.by_name.get(wanted.name)
            if found is None:
                yield Difference(wanted.name, "missing", "", _kind_of(wanted))
                continue
            if found.dtype != wanted.dtype:
                yield Difference(wanted.name, "dtype", found.dtype, wanted.dtype)
            if found.shape != wanted.shape:
                yield Difference(wanted.name, "shape", str(list(found.shape)), str(list(wanted.shape)))

    def _extras(self, expected: "Manifest") -> Iterator[Difference]:
        for spec in self.tensors:
            if spec.name not in expected.by_name:
                yield Difference(spec.name, "unexpected", _kind_of(spec), "")


def _kind_of(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
