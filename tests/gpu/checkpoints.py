"""Random checkpoints of a small Qwen3, made on the GPU: big enough that released memory shows."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def shapes() -> list[tuple[str, tuple[int, ...]]]:
    """Every parameter's Hugging Face name and shape."""
    hidden, inner, vocab, head = 1024, 3072, 8192, 128
    query, key = 16 * head, 8 * head
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(16):
        prefix = f"model.layers.{layer}."
        found += [
            (prefix + "input_layernorm.weight", (hidden,)),
            (prefix + "self_attn.q_proj.weight", (query, hidden)),
            (prefix + "self_attn.k_proj.weight", (key, hidden)),
            (prefix + "self_attn.v_proj.weight", (key, hidden)),
            (prefix + "self_attn.o_proj.weight", (hidden, query)),
            (prefix + "self_attn.q_norm.weight", (head,)),
            (prefix + "self_attn.k_norm.weight", (head,)),
            (prefix + "post_attention_layernorm.weight", (hidden,)),
            (prefix + "mlp.gate_proj.weight", (inner, hidden)),
            (prefix + "mlp.up_proj.weight", (inner, hidden)),
            (prefix + "mlp.down_proj.weight", (hidden, inner)),
        ]
    return [*found, ("model.norm.weight", (hidden,)), ("lm_head.weight", (vocab, hidden))]


def make(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Write a checkpoint; returns its tensors on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tensors = {}
    for name, shape in shapes():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        else:
            values = torch.randn(shape, generator=generator, device="cuda") * 0.05
            tensors[name] = values.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return tensors
