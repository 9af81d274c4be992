"""Shapes of well-known models, for servers that start with random weights (`--load-format dummy`)."""

import json
from pathlib import Path
from typing import NamedTuple

import torch


class Qwen3(NamedTuple):
    """A dense Qwen3, without tied embeddings."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128

    def write_config(self, folder: Path) -> Path:
        """A folder that a server can be started from."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        return folder

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's Hugging Face name and shape."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            found |= {
                prefix + "input_layernorm.weight": (self.hidden,),
                prefix + "self_attn.q_proj.weight": (query, self.hidden),
                prefix + "self_attn.k_proj.weight": (key, self.hidden),
                prefix + "self_attn.v_proj.weight": (key, self.hidden),
                prefix + "self_attn.o_proj.weight": (self.hidden, query),
                prefix + "self_attn.q_norm.weight": (self.head_dim,),
                prefix + "self_attn.k_norm.weight": (self.head_dim,),
                prefix + "post_attention_layernorm.weight": (self.hidden,),
                prefix + "mlp.gate_proj.weight": (self.inner, self.hidden),
                prefix + "mlp.up_proj.weight": (self.inner, self.hidden),
                prefix + "mlp.down_proj.weight": (self.hidden, self.inner),
            }
        return found | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}

    def separate(self, device: str) -> dict[str, torch.Tensor]:
        """A tensor for each parameter, each in memory of its own."""
        return {
            name: torch.empty(shape, dtype=torch.bfloat16, device=device)
            for name, shape in self.shapes().items()
        }

    def in_one(self, device: str) -> dict[str, torch.Tensor]:
        """The same as views of one allocation."""
        shapes = self.shapes()
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        whole = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
        return {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), whole.split(sizes), strict=True)
        }


QWEN3_8B = Qwen3(4096, 12288, 36, 32, 8, 151_936)
QWEN3_TINY = Qwen3(64, 192, 2, 4, 2, 256, 16)


def fill(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Give tensors the random values of a seed: the same for the same shapes in the same order."""
    generator = torch.Generator(device=next(iter(tensors.values())).device).manual_seed(seed)
    for tensor in tensors.values():
        tensor.normal_(0.0, 0.02, generator=generator)
