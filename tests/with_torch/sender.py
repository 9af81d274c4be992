"""A trainer in a process of its own, to be killed: two refits of one source in shared host memory.

python -m tests.with_torch.sender URL POLICY FOLDER FOLDER
"""

import sys
from pathlib import Path

from safetensors.torch import load_file

from refitfsm import BlockingFleet
from refitfsm.weights.torch_source import TorchSource


def main(url: str, policy: str, *folders: str) -> None:
    """Push the weights of each folder in turn, from the memory of the first."""
    values = [load_file(Path(folder) / "model.safetensors") for folder in folders]
    ours = {name: tensor.clone() for name, tensor in values[0].items()}
    source = TorchSource(ours, share_host_memory=True)
    with BlockingFleet.connect([url], policy=policy) as fleet:
        for version, given in enumerate(values, start=1):
            for name, tensor in given.items():
                ours[name].copy_(tensor)
            fleet.refit(source, version)


if __name__ == "__main__":
    main(*sys.argv[1:])
