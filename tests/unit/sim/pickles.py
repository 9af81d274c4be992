"""Weight payloads as torch pickles them, written without torch: float32 tensors in protocol 3."""

import base64
import struct
from collections.abc import Iterable, Mapping
from math import prod

from refitfsm.sim.content import tiny_tensors

Named = Iterable[tuple[str, tuple[int, ...], bytes]]


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def _bytes(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def _storage(data: bytes) -> bytes:
    count = len(data) // 4
    pid = _tuple(_text("storage"), b"ctorch\nFloatStorage\n", _text("0"), _text("cpu"), _number(count), b"N")
    start = b"\x80\x02"
    return b"".join(
        [
            start + _number(0x1950A86A20F9469CFC6C) + b".",
            start + _number(1001) + b".",
            start + b"}.",
            start + pid + b"Q.",
            start + b"]" + _text("0") + b"a.",
            struct.pack("<q", count) + data,
        ]
    )


def _tensor(shape: tuple[int, ...], data: bytes) -> bytes:
    strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
    storage = b"ctorch.storage\n_load_from_bytes\n" + _tuple(_bytes(_storage(data))) + b"R"
    hooks = b"ccollections\nOrderedDict\n)R"
    sizes, steps = _tuple(*map(_number, shape)), _tuple(*map(_number, strides))
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n"
        + _tuple(storage, _number(0), sizes, steps, b"\x89", hooks)
        + b"R"
    )


def _entry(value: bytes) -> str:
    return base64.b64encode(b"\x80\x03" + value + b".").decode()


def named_list(named: Named) -> str:
    """One entry of `serialized_named_tensors`: a list of named float32 tensors."""
    pairs = [_tuple(_text(name), _tensor(shape, data)) for name, shape, data in named]
    return _entry(b"](" + b"".join(pairs) + b"e")


def bucket(named: Named) -> str:
    """One entry for `load_format` "flattened_bucket": one flat tensor and where each lies in it."""
    flat, metadata = b"", []
    for name, shape, data in named:
        start, end = len(flat) // 4, (len(flat) + len(data)) // 4
        fields = [
            _text("name") + _text(name),
            _text("shape") + b"ctorch\nSize\n" + _tuple(_tuple(*map(_number, shape))) + b"R",
            _text("dtype") + b"ctorch\nfloat32\n",
            _text("start_idx") + _number(start),
            _text("end_idx") + _number(end),
            _text("numel") + _number(end - start),
        ]
        cls = b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n"
        metadata.append(cls + b")\x81}(" + b"".join(fields) + b"ub")
        flat += data
    parts = _text("flattened_tensor") + _tensor((len(flat) // 4,), flat)
    parts += _text("metadata") + b"](" + b"".join(metadata) + b"e"
    return _entry(b"}(" + parts + b"u")


def tiny(seed: int) -> list[tuple[str, tuple[int, ...], bytes]]:
    """The tiny model's tensors."""
    return [(name, shape, data) for name, (_, shape, data) in tiny_tensors(seed).items()]


def zeros(name: str, *shape: int) -> list[tuple[str, tuple[int, ...], bytes]]:
    """One tensor of zeros."""
    return [(name, shape, bytes(4 * prod(shape)))]


def _nan() -> list[tuple[str, tuple[int, ...], bytes]]:
    return [("model.norm.weight", (8,), struct.pack("<8f", *[float("nan")] * 8))]


_FILE_DESCRIPTOR = b"ctorch.multiprocessing.reductions\nrebuild_storage_fd\n)R"

PAYLOADS: Mapping[str, str] = {
    "$seed0": named_list(tiny(0)),
    "$seed1": named_list(tiny(1)),
    "$bucket of seed1": bucket(tiny(1)),
    "$direct norm of seed0": named_list([each for each in tiny(0) if each[0] == "model.norm.weight"]),
    "$one tensor": named_list([each for each in tiny(1) if each[0] == "lm_head.weight"]),
    "$no tensors": named_list([]),
    "$unknown name": named_list(zeros("model.nope.weight", 8)),
    "$unknown layer": named_list(zeros("model.layers.7.self_attn.q_proj.weight", 8, 8)),
    "$unexpected bias": named_list(zeros("model.layers.0.self_attn.q_proj.bias", 8)),
    "$wrong shape": named_list(zeros("model.norm.weight", 9)),
    "$wrong fused shape": named_list(zeros("model.layers.0.self_attn.q_proj.weight", 8, 4)),
    "$nan": named_list(_nan()),
    "$garbage": base64.b64encode(b"garbage bytes that are no pickle").decode(),
    "$off the list": _entry(b"cposix\ngetcwd\n)R"),
    "$by file descriptor": _entry(_FILE_DESCRIPTOR),
}
"""The payloads that scenarios name."""


def fill(value: object) -> object:
    """A body with the names of payloads replaced by the payloads."""
    if isinstance(value, dict):
        return {key: fill(each) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each) for each in value]
    return PAYLOADS[value] if isinstance(value, str) and value.startswith("$") else value
