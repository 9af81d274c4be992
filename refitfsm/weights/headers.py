"""The header of a safetensors file: reading it distrustfully.

A file is eight bytes of header length (little-endian), a JSON object, and the data. The object gives
each tensor a dtype, a shape and a range of the data; the ranges follow each other without gap or
overlap and use the data up. A file that departs from this is damaged or was cut short in copying.
"""

import json
import struct
from pathlib import Path
from typing import NamedTuple, TypeGuard

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import TensorSpec

HEADER_BYTES_MAX = 100_000_000
"""The limit of the format's own readers."""


class Entry(NamedTuple):
    """One tensor of a file: `begin` and `end` count bytes from the start of the data."""

    spec: TensorSpec
    begin: int
    end: int


def parse_header(path: Path, data: memoryview) -> tuple[int, tuple[Entry, ...]]:
    """Where the data starts in the file, and its tensors in order of their data.

    Raises:
        WeightsError: the file does not follow the format.
    """
    start = _data_start(path, data)
    header = decode_object(path, bytes(data[8:start]))
    header.pop("__metadata__", None)
    entries = sorted((_entry(path, *item) for item in header.items()), key=lambda entry: entry[1:])
    _check_ranges(path, entries, len(data) - start)
    return start, tuple(entries)


def decode_object(path: Path, raw: bytes) -> dict[str, object]:
    """A JSON object in which no key appears twice.

    Raises:
        WeightsError: it is something else.
    """
    try:
        value = json.loads(raw, object_pairs_hook=_without_duplicates)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: is not JSON where it must be ({error}): copy the file again") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds no JSON object where it must: copy the file again")
    return value


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise WeightsError(f"{twice!r} is given twice: write the file again")
    return found


def _data_start(path: Path, data: memoryview) -> int:
    if len(data) < 8:
        raise WeightsError(f"{path}: only {len(data)} bytes long, cut short: copy the file again")
    (length,) = struct.unpack("<Q", data[:8])
    if length > HEADER_BYTES_MAX:
        raise WeightsError(f"{path}: a header of {length} bytes; this is no safetensors file: convert it")
    if 8 + length > len(data):
        raise WeightsError(f"{path}: cut short within its header: copy the file again")
    return 8 + int(length)


def _entry(path: Path, name: str, fields: object) -> Entry:
    damaged = WeightsError(
        f"{path}: tensor {name!r} has no proper dtype, shape and data_offsets: write the file again"
    )
    if not isinstance(fields, dict):
        raise damaged
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _are_integers(shape) or not _are_integers(offsets):
        raise damaged
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise damaged
    try:
        spec = TensorSpec.of(name, dtype, tuple(shape))
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    begin, end = offsets
    if end - begin != spec.nbytes:
        raise WeightsError(
            f"{path}: tensor {name!r} has {end - begin} bytes, and {dtype} {shape} takes {spec.nbytes}:"
            " write the file again"
        )
    return Entry(spec, begin, end)


def _check_ranges(path: Path, entries: list[Entry], size: int) -> None:
    reached = 0
    for spec, begin, end in entries:
        if end > size:
            raise WeightsError(
                f"{path}: tensor {spec.name!r} ends at byte {end} of the data, and there are {size}:"
                " cut short, copy the file again"
            )
        if begin != reached:
            problem = "overlaps the one before it" if begin < reached else "leaves a gap before it"
            raise WeightsError(f"{path}: tensor {spec.name!r} {problem}: write the file again")
        reached = end
    if reached != size:
        raise WeightsError(f"{path}: {size - reached} bytes belong to no tensor: copy the file again")


def _are_integers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int for item in value)
