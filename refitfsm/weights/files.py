"""Writing safetensors files, and a tiny model that a real SGLang can serve."""

import json
import math
import random
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from refitfsm.weights.dtypes import DTYPES, size_bytes
from refitfsm.weights.errors import WeightsError

TensorData: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""A tensor's dtype in safetensors spelling, its shape, and its elements: row-major, little-endian."""


def write_safetensors(path: str | Path, tensors: Mapping[str, TensorData]) -> None:
    """Write one safetensors file. Wider elements come first, so that all are aligned.

    Raises:
        WeightsError: the bytes of a tensor do not fit its dtype and shape.
    """
    for name, (dtype, shape, data) in tensors.items():
        if size_bytes(dtype, shape) != len(data):
            raise WeightsError(f"tensor {name!r}: {len(data)} bytes do not fit {dtype} {list(shape)}")
    ordered = sorted(tensors.items(), key=lambda item: -DTYPES[item[1][0]].bits)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape, data) in ordered:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.writelines(data for _, (_, _, data) in ordered)


VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 512, 64, 128, 2, 4, 2

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def tiny_checkpoint(folder: str | Path, seed: int) -> Path:
    """Write a Llama of 139,584 float32 parameters (560 kB) and its config into `folder`; returns the folder.

    The values look like a fresh initialisation and depend on the seed and the tensor's name alone, on
    every platform. Two seeds give models that answer differently. There is no tokenizer: start SGLang
    with `--skip-tokenizer-init` and send token ids below 512.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    tensors = {name: ("F32", shape, _initial(seed, name, shape)) for name, shape in _llama_shapes()}
    write_safetensors(target / "model.safetensors", tensors)
    return target


def _llama_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    kv_size = KV_HEADS * HIDDEN // HEADS
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_size, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_size, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def _initial(seed: int, name: str, shape: tuple[int, ...]) -> bytes:
    if len(shape) == 1:
        return struct.pack("<f", 1.0) * shape[0]
    rows, columns = shape
    draw = random.Random(f"{seed}:{name}")  # noqa: S311 - a fixed model, not a secret
    words = struct.unpack(f"<{4 * rows * columns}H", draw.randbytes(8 * rows * columns))
    # The sum of four uniform words is near enough to normal, and exact, so the same on every platform.
    scale = math.sqrt(3 / (4 * columns)) / (1 << 15)
    sums = (sum(words[at : at + 4]) - 2 * 0xFFFF for at in range(0, len(words), 4))
    return struct.pack(f"<{rows * columns}f", *(scale * value for value in sums))
