"""Random checkpoints of a small Qwen3, made on the GPU: big enough that released memory shows."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.gpu.models import Qwen3

SMALL = Qwen3(hidden=1024, inner=3072, layers=16, heads=16, kv_heads=8, vocab=8192)


def make(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Write a checkpoint; returns its tensors on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tensors = {}
    for name, shape in SMALL.shapes().items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        else:
            values = torch.randn(shape, generator=generator, device="cuda") * 0.05
            tensors[name] = values.to(torch.bfloat16)
    SMALL.write_config(folder)
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return tensors
