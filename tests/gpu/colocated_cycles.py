"""Three colocated refit cycles of two real SGLang servers that share one GPU with the trainer.

    python3 -m tests.gpu.colocated_cycles --out FILE.json [--kernels ARCHIVE]

Weights go over CUDA IPC. After each cycle the greedy output and the checksum of both servers are compared
with those of a server started from the same checkpoint. Prints a table last; ends with 1 if anything
differs.
"""

import argparse
import asyncio
import datetime
import json
import sys
import tempfile
import time
from pathlib import Path

import pynvml
import torch

from refitfsm import Fleet, NotServing, ServerSpec
from refitfsm.audit.verify import verify_file
from refitfsm.reports import CycleReport
from tests.gpu.checkpoints import make
from tests.gpu.server import GpuServer, kernels, site
from tests.real.server import NoAnswerError, call, greedy, side_by_side

PROMPTS = ([5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], [4000, 17, 99])
TOKENS = 16
CYCLES = ("B", "A", "B")
FOREIGN_PROBE_S = 2.0


def used_bytes() -> int:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def fingerprint(url: str) -> tuple[list[list[int]], str]:
    """Greedy outputs and checksum of one server."""
    answer = call(url, "/weights_checker", {"action": "checksum"})
    checksum = "+".join(rank["per_gpu_checksum"] for rank in answer.value["ranks"])
    return [greedy(url, prompt, TOKENS) for prompt in PROMPTS], checksum


def foreign_probe(url: str) -> str:
    """A stranger's health probe, which kills a released server that is not paused."""
    try:
        return str(call(url, "/health", timeout_s=FOREIGN_PROBE_S).status)
    except NoAnswerError as error:
        return f"held ({type(error.__cause__ or error).__name__})"


async def cycle(fleet: Fleet, version: int, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """One cycle, measured."""
    before = used_bytes()
    release = await fleet.release()
    released = used_bytes()
    try:
        await fleet.generate([1, 2, 3])
        refused = ""
    except NotServing as error:
        refused = str(error)
    probes = await asyncio.gather(
        *(asyncio.to_thread(foreign_probe, view.server) for view in fleet.status().servers)
    )
    refit = await fleet.refit(tensors, version)
    return {
        "version": version,
        "used_before_release_bytes": before,
        "used_after_release_bytes": released,
        "used_after_refit_bytes": used_bytes(),
        "release": shown(release),
        "refit": shown(refit),
        "generate_while_released": refused,
        "foreign_health_while_released": probes,
    }


def shown(report: CycleReport) -> dict[str, object]:
    return {"seconds": report.seconds, "phases_s": dict(report.phases_s), "failed": list(report.failed)}


async def run(servers: list[str], weights: dict[str, dict[str, torch.Tensor]], journal: Path) -> list[dict]:
    gpu = str(torch.cuda.get_device_properties(0).uuid)
    specs = [ServerSpec(url, (gpu,)) for url in servers]
    rows = []
    policy = Path(__file__).with_name("colocated.toml")
    async with Fleet.connect(specs, policy=policy, journal=journal) as fleet:
        for version, name in enumerate(CYCLES, start=1):
            row = await cycle(fleet, version, weights[name])
            row["weights"] = name
            row["fingerprints"] = [await asyncio.to_thread(fingerprint, url) for url in servers]
            answer = await fleet.generate([5, 6, 7], {"temperature": 0, "max_new_tokens": 4})
            row["answer_version"] = answer.version
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Three colocated refit cycles on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", type=Path)
    options = parser.parse_args()
    pynvml.nvmlInit()
    folder = Path(tempfile.mkdtemp(prefix="refitfsm-"))
    weights = {name: make(folder / name, seed) for name, seed in (("A", 0), ("B", 1))}
    weight_bytes = sum(tensor.nbytes for tensor in weights["A"].values())
    packages = site()
    pair = [GpuServer(folder / "A", packages=packages) for _ in range(2)]
    reference = GpuServer(folder / "B", packages=packages)
    started = time.monotonic()
    with kernels(options.kernels), side_by_side(*pair, reference):
        start_s = time.monotonic() - started
        expected = {"A": fingerprint(pair[0].url), "B": fingerprint(reference.url)}
        reference.stop()
        rows = asyncio.run(run([server.url for server in pair], weights, folder / "audit.jsonl"))
    verified = verify_file(folder / "audit.jsonl")
    good = expected["A"] != expected["B"]
    for row in rows:
        row["right"] = [tuple(item) == expected[str(row["weights"])] for item in row.pop("fingerprints")]
        good = good and all(row["right"]) and row["answer_version"] == row["version"]
    result = {
        "what": "three colocated cycles, two servers on one GPU, CUDA IPC, checksums and greedy output",
        "command": "python3 -m tests.gpu.colocated_cycles --out FILE.json",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"gpu": torch.cuda.get_device_name(0), "gpus": 1},
        "versions": {"sglang": "0.5.16", "torch": torch.__version__, "python": sys.version.split()[0]},
        "weight_bytes": weight_bytes,
        "servers_start_s": round(start_s, 1),
        "audit": verified._asdict(),
        "cycles": rows,
        "good": good,
    }
    options.out.write_text(json.dumps(result, indent=2, default=list) + "\n")
    print_table(rows, weight_bytes)
    print("GOOD" if good else "WRONG")
    return 0 if good else 1


def print_table(rows: list[dict], weight_bytes: int) -> None:
    print(f"{weight_bytes / 1e9:.2f} GB of weights a server, two servers")
    for row in rows:
        freed = row["used_before_release_bytes"] - row["used_after_release_bytes"]
        phases = row["release"]["phases_s"] | {
            kind + "'" if kind in row["release"]["phases_s"] else kind: seconds
            for kind, seconds in row["refit"]["phases_s"].items()
        }
        times = " ".join(f"{kind} {seconds * 1000:.0f}" for kind, seconds in phases.items())
        print(
            f"v{row['version']} {row['weights']}: right {row['right']}, freed {freed / 1e9:.2f} GB,"
            f" release {row['release']['seconds'] * 1000:.0f} ms,"
            f" refit {row['refit']['seconds'] * 1000:.0f} ms ({times}),"
            f" foreign /health {row['foreign_health_while_released']}"
        )


if __name__ == "__main__":
    sys.exit(main())
