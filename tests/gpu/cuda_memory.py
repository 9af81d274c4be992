"""CUDA memory lent to another process. On a machine without a GPU there is nothing to lend."""

import os
import subprocess
import sys
import textwrap
from multiprocessing.connection import Connection

import pytest
import torch

from refitfsm.weights.cuda import CudaMemory
from refitfsm.weights.handles import encoded, named_values
from refitfsm.weights.lending import Lent
from refitfsm.weights.local import encode_here

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def borrow(pipe: Connection) -> None:
    """Take entries, answer what is in them, and let go of each at a word."""
    from sglang.srt.utils import MultiprocessingSerializer  # noqa: PLC0415 - the sender needs none
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions  # noqa: PLC0415

    monkey_patch_torch_reductions()
    while (entry := pipe.recv()) is not None:
        named = MultiprocessingSerializer.deserialize(entry)
        pipe.send([(name, tensor.tolist()) for name, tensor in named])  # SGLang's patch pickles no CPU tensor
        pipe.recv()
        del named
        pipe.send("let go")


def back(lent: Lent) -> bool:
    return all(counter.is_back() for counter in lent.counters)


def test_a_borrower_on_the_gpu_sees_the_tensors_and_gives_them_back() -> None:
    """Tensors of several formats, alone and in shared allocations, are read as they are, and counted back."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=borrow, args=(theirs,))
    process.start()
    theirs.close()  # if it ends, so does the wait for it
    memory = CudaMemory(0)
    large = torch.randn(600, 1000, device="cuda")
    tensors = {
        "whole": large,
        "rows": large[7:9],
        "bf16": torch.randn(5, 7, device="cuda", dtype=torch.bfloat16),
        "scalar": torch.tensor(3, device="cuda"),
        "bytes": torch.arange(200, device="cuda", dtype=torch.uint8)[13:99],
        "leaf": torch.nn.Parameter(torch.ones(3, device="cuda")),
    }
    for value in (1.0, 2.0):
        large.fill_(value)
        memory.synchronize()
        lent = memory.lend(tensors)
        assert len(lent.counters) < len(tensors)
        ours.send(encoded(named_values(lent)).decode())
        found = dict(ours.recv())
        assert not back(lent)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name] == tensor.tolist()
        ours.send("enough")
        ours.recv()
        assert back(lent)
    offer = encode_here([("w", large), ("v", tensors["bf16"])])  # as each rank of a group does
    ours.send(offer.entry.decode())
    assert dict(ours.recv())["v"] == tensors["bf16"].tolist()
    ours.send("enough")
    assert offer.settle().applied
    ours.send(None)
    process.join()


@pytest.mark.parametrize("setting", ["expandable_segments:True", "expandable_segments:False"])
def test_memory_of_expandable_segments_is_refused_with_the_remedy(setting: str) -> None:
    """Other processes cannot map it, and a server would die of the handle: the error says what to set."""
    script = """
        import torch
        from refitfsm.weights.cuda import CudaMemory
        from refitfsm.weights.errors import WeightsError
        try:
            print(len(CudaMemory(0).lend({"w": torch.ones(30_000_000, device="cuda")}).values), "lent")
        except WeightsError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": setting},
        capture_output=True,
        text=True,
        check=False,
    )
    if setting.endswith("True"):
        assert done.stdout.startswith("tensor 'w': its GPU memory cannot be shared"), done.stderr
        assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in done.stdout
    else:
        assert done.stdout == "1 lent\n", done.stderr
