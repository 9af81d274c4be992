"""The conformance checks on real SGLang servers with the real memory saver, on one GPU.

    python3 -m tests.gpu.conformance --out FILE.json [--kernels ARCHIVE]

Weights go over CUDA IPC. One server takes the harmless checks in turn, and each lethal check has one of
its own; all start side by side. Prints a line for each check; ends with 1 if any fails.
"""

import argparse
import asyncio
import datetime
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from refitfsm.drivers.http import HttpTransport
from refitfsm.weights.torch_source import TorchSource
from tests.conformance.checks import CHECKS, Check
from tests.conformance.lethal import LETHAL
from tests.conformance.subject import Subject
from tests.gpu.checkpoints import make
from tests.gpu.server import GpuServer, kernels, site
from tests.real.server import side_by_side

ONE_PUSH = 1 << 40
Weights = dict[str, torch.Tensor]


async def play(check: Check, url: str, weights: tuple[Weights, Weights]) -> dict[str, object]:
    """One check against the server at a URL."""
    transport = HttpTransport(url)
    started = time.monotonic()
    error = ""
    try:
        subject = Subject(transport, lambda seed: TorchSource(weights[seed]), chunk_bytes_max=ONE_PUSH)
        await check(subject)
    except Exception:  # noqa: BLE001 - a check may fail in any way; each way is reported
        error = traceback.format_exc(limit=3)
    finally:
        await transport.aclose()
    seconds = round(time.monotonic() - started, 3)
    return {"check": check.__name__, "good": not error, "seconds": seconds, "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description="The conformance checks on real servers on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="refitfsm-"))
    weights = (make(folder / "A", 0), make(folder / "B", 1))
    packages = site()
    # Side by side they see each other's memory come and go: the pool is bounded by tokens, not by the share.
    servers = [
        GpuServer(folder / "A", packages=packages, mem_fraction_static=0.4) for _ in range(1 + len(LETHAL))
    ]
    with kernels(options.kernels), side_by_side(*servers):
        rows = [asyncio.run(play(check, servers[0].url, weights)) for check in CHECKS]
        for check, server in zip(LETHAL, servers[1:], strict=True):
            row = asyncio.run(play(check, server.url, weights))
            row["exit_status"] = server.wait_exit(30.0) if row["good"] else None
            rows.append(row)
    good = all(row["good"] for row in rows)
    result = {
        "what": "conformance checks of the driver's contract on real servers with the real memory saver",
        "command": "python3 -m tests.gpu.conformance --out FILE.json",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"gpu": torch.cuda.get_device_name(0), "gpus": 1},
        "versions": {"sglang": "0.5.16", "torch": torch.__version__, "python": sys.version.split()[0]},
        "checks": rows,
        "good": good,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        print(f"{'good ' if row['good'] else 'WRONG'} {row['seconds']:7.3f} s  {row['check']}")
        if row["error"]:
            print(row["error"])
    print("GOOD" if good else "WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
