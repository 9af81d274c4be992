"""The conformance checks on real SGLang servers with the real memory saver, on one GPU.

    python3 -m tests.gpu.conformance --out FILE.json [--only TEXT] [--kernels ARCHIVE]

Weights go over CUDA IPC. One server takes the harmless checks in turn; after a failure, and for each lethal
check, there is a new one. Prints a line for each check; ends with 1 if any fails.
"""

import argparse
import asyncio
import datetime
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

import torch

from refitfsm.sim.conformance.catalogue import EVERY
from refitfsm.sim.conformance.makers import connected
from refitfsm.sim.conformance.report import as_rows, none_failed, shown, summary
from refitfsm.sim.conformance.runner import Maker, Outcome, play_all
from refitfsm.sim.conformance.subject import Subject
from refitfsm.weights.torch_source import TorchSource
from tests.gpu.checkpoints import make
from tests.gpu.server import GpuServer, kernels, site
from tests.real.server import side_by_side

ONE_PUSH = 1 << 40
AT_ONCE = 8
"""Servers that start side by side: a start is mostly imports, and each takes some 5 GB of host memory."""
Weights = dict[str, torch.Tensor]


@contextmanager
def pool(model: Path, weights: tuple[Weights, Weights]) -> Iterator[Maker]:
    """A maker that takes servers out of batches, and starts the next batch when one is used up."""
    packages = site()
    ready: list[GpuServer] = []

    with ExitStack() as stack:

        @asynccontextmanager
        async def take() -> AsyncIterator[Subject]:
            if not ready:
                # Side by side they see each other's memory come and go: tokens bound the pool, not the share.
                batch = [GpuServer(model, packages=packages, mem_fraction_static=0.4) for _ in range(AT_ONCE)]
                stack.enter_context(side_by_side(*batch))
                ready.extend(batch)
            server = ready.pop()
            with closing(TorchSource(weights[0])) as first, closing(TorchSource(weights[1])) as second:
                try:
                    async with connected(server.url, (first, second), chunk_bytes_max=ONE_PUSH) as subject:
                        yield subject
                finally:
                    server.close()

        yield take


async def played(take: Maker, only: str) -> list[Outcome]:
    """All checks whose names contain a text."""
    return await shown(play_all(take, (check for check in EVERY if only in check.name)))


def main() -> int:
    parser = argparse.ArgumentParser(description="The conformance checks on real servers on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", metavar="TEXT", default="", help="checks whose name contains this")
    parser.add_argument("--kernels", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="refitfsm-"))
    weights = (make(folder / "A", 0), make(folder / "B", 1))
    with kernels(options.kernels), pool(folder / "A", weights) as take:
        outcomes = asyncio.run(played(take, options.only))
    result = {
        "what": "conformance checks on real servers with the real memory saver",
        "command": "python3 -m tests.gpu.conformance --out FILE.json",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"gpu": torch.cuda.get_device_name(0), "gpus": 1},
        "versions": {"sglang": "0.5.16", "torch": torch.__version__, "python": sys.version.split()[0]},
        "checks": as_rows(outcomes),
        "summary": summary(outcomes),
        "good": none_failed(outcomes),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(summary(outcomes))
    return 0 if none_failed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
