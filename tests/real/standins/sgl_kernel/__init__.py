"""Stands in for SGLang's CPU kernels, whose build no registry has.

With SGLANG_USE_CPU_ENGINE=1 SGLang imports some of its `*_cpu` functions by name while it starts, and calls
none of them for a plain dense model: no `torch.ops.sgl_kernel` operator is registered, so it takes its native
torch code everywhere. Whatever is called after all says so by name.
"""


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"the stand-in for sgl_kernel has no {name}")

    missing.__name__ = name
    return missing
