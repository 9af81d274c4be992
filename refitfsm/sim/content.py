"""What weights are, in a simulation: per tensor a dtype, a shape and a digest of the bytes.

The simulator never computes with weights, so it does not keep their bytes. Whether two servers hold
the same weights, and whether a cache was made by them, is decided by digests alone.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

from refitfsm.sim.numbers import packed, unpacked

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}
"""Bytes of one element, by the dtype's name in the safetensors format."""

HEAD_BYTES: Final = 1 << 16
"""How much of a tensor is kept to be read back."""

_NAN_PROBE: Final = 64


class TensorSpec(NamedTuple):
    """One tensor's content."""

    dtype: str
    """A key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    digest: str
    """`tensor_digest` of the bytes: 16 hexadecimal digits."""
    head: bytes = b""
    """The first bytes of the tensor, at most `HEAD_BYTES`, or nothing where they are not known."""
    poisoned: bool = False
    """Whether the tensor begins with a NaN: a forward pass through it yields garbage."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


Parameters = Mapping[str, TensorSpec]
"""All tensors of a model by name."""


def tensor_digest(data: bytes | memoryview) -> str:
    """16 hexadecimal digits that stand for the bytes of one tensor."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def spec_of(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> TensorSpec:
    """Describe a tensor given by its bytes, in row-major order, little-endian.

    Raises:
        ValueError: the number of bytes is not what dtype and shape ask for.
    """
    expected = prod(shape) * DTYPE_BYTES[dtype]
    if len(data) != expected:
        raise ValueError(f"a {dtype} tensor of shape {list(shape)} has {expected} bytes, got {len(data)}")
    head = bytes(data[:HEAD_BYTES])
    return TensorSpec(dtype, shape, tensor_digest(data), head, _begins_with_nan(dtype, head))


def content_digest(digests: Iterable[tuple[str, str]]) -> str:
    """16 hexadecimal digits that stand for a whole set of weights.

    `digests` are (tensor name, tensor digest) pairs; their order does not matter.
    """
    text = ";".join([f"{name}={digest}" for name, digest in sorted(digests)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def digest_of(parameters: Parameters) -> str:
    """`content_digest` of a complete model."""
    return content_digest((name, spec.digest) for name, spec in parameters.items())


def cast(spec: TensorSpec, dtype: str) -> TensorSpec:
    """The content after a load into a parameter of another dtype.

    Only the values at its beginning are converted: the digest is one that only the same source bytes in the
    same source dtype lead to.
    """
    if spec.dtype == dtype:
        return spec
    mark = tensor_digest(f"{spec.dtype}->{dtype}:{spec.digest}".encode())
    head = packed(dtype, unpacked(spec.dtype, spec.head))[:HEAD_BYTES]
    return TensorSpec(dtype, spec.shape, mark, head, spec.poisoned)


def _begins_with_nan(dtype: str, head: bytes) -> bool:
    """Looks at a few elements only: a poisoned tensor is poisoned throughout in practice."""
    if dtype in {"F32", "F64"}:
        values = array("f" if dtype == "F32" else "d")
        values.frombytes(head[: _NAN_PROBE * values.itemsize])
        return any(value != value for value in values)  # noqa: PLR0124 - NaN is what differs from itself
    if dtype in {"F16", "BF16"}:
        exponent = 0x7C00 if dtype == "F16" else 0x7F80
        words = array("H")
        words.frombytes(head[: _NAN_PROBE * 2])
        return any(word & exponent == exponent and word & (0x7FFF ^ exponent) for word in words)
    return False


TINY_VOCAB: Final = 512
_TINY_HIDDEN: Final = 8
_TINY_KV: Final = 4
_TINY_INNER: Final = 16
_TINY_LAYERS: Final = 2


def tiny_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama-like model of about 9,600 parameters, in checkpoint order."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (TINY_VOCAB, _TINY_HIDDEN)}
    for layer in range(_TINY_LAYERS):
        at = f"model.layers.{layer}."
        shapes[at + "self_attn.q_proj.weight"] = (_TINY_HIDDEN, _TINY_HIDDEN)
        shapes[at + "self_attn.k_proj.weight"] = (_TINY_KV, _TINY_HIDDEN)
        shapes[at + "self_attn.v_proj.weight"] = (_TINY_KV, _TINY_HIDDEN)
        shapes[at + "self_attn.o_proj.weight"] = (_TINY_HIDDEN, _TINY_HIDDEN)
        shapes[at + "mlp.gate_proj.weight"] = (_TINY_INNER, _TINY_HIDDEN)
        shapes[at + "mlp.up_proj.weight"] = (_TINY_INNER, _TINY_HIDDEN)
        shapes[at + "mlp.down_proj.weight"] = (_TINY_HIDDEN, _TINY_INNER)
        shapes[at + "input_layernorm.weight"] = (_TINY_HIDDEN,)
        shapes[at + "post_attention_layernorm.weight"] = (_TINY_HIDDEN,)
    shapes["model.norm.weight"] = (_TINY_HIDDEN,)
    shapes["lm_head.weight"] = (TINY_VOCAB, _TINY_HIDDEN)
    return shapes


@lru_cache(maxsize=16)
def tiny_tensors(seed: int) -> Mapping[str, tuple[str, tuple[int, ...], bytes]]:
    """The tiny model's tensors: name -> (dtype "F32", shape, little-endian bytes). A pure function."""
    return {
        name: ("F32", shape, _tiny_bytes(f"{seed}:{name}", prod(shape)))
        for name, shape in tiny_shapes().items()
    }


@lru_cache(maxsize=16)
def tiny_model(seed: int = 0) -> Parameters:
    """The tiny model's content for a seed. A pure function, shared between callers: do not change it."""
    return {name: spec_of(dtype, shape, data) for name, (dtype, shape, data) in tiny_tensors(seed).items()}


def _tiny_bytes(label: str, count: int) -> bytes:
    noise = hashlib.shake_128(label.encode()).digest(count)
    return array("f", [(value - 128) / 1024 for value in noise]).tobytes()
