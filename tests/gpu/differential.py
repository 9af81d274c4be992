"""Random sequences of calls on real SGLang servers on one GPU and on the simulator, compared.

    python3 -m tests.gpu.differential --out FILE.json [--kernels ARCHIVE] [--sequences N] ...

As `tests.real.differential`, with the real memory saver and weights that go over CUDA IPC.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import torch

from refitfsm.sim.config import SimConfig
from refitfsm.sim.conformance.differential import compare
from refitfsm.sim.conformance.report import compared
from tests.gpu.checkpoints import make
from tests.gpu.conformance import pool
from tests.gpu.server import kernels
from tests.real.differential import arguments, drawn, ended

CONFIG = SimConfig(sglang_version="0.5.16", memory_saver=True, skip_warmup=True)


def main() -> int:
    parser = arguments()
    parser.add_argument("--kernels", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="refitfsm-"))
    weights = (make(folder / "A", 0), make(folder / "B", 1))
    with kernels(options.kernels), pool(folder / "A", weights) as take:
        played = asyncio.run(compared(compare(take, drawn(options, CONFIG))))
    return ended(
        played,
        options.out,
        what="random sequences of calls on real servers on one GPU, compared with the simulator",
        command="python3 -m tests.gpu.differential --out FILE.json",
        machine={"gpu": torch.cuda.get_device_name(0), "gpus": 1},
        versions={
            "sglang": CONFIG.sglang_version,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
    )


if __name__ == "__main__":
    sys.exit(main())
