"""`refitfsm run` between two safetensors checkpoints on a real server with the real memory saver.

    python3 -m tests.gpu.refit_command --out FILE.json [--kernels ARCHIVE]

The weights travel as bytes. After the command the greedy output and the checksum are compared with those
of a server started from the same checkpoint. Ends with 1 if anything differs.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu.checkpoints import make
from tests.gpu.colocated_cycles import fingerprint
from tests.gpu.server import GpuServer, kernels, site
from tests.real.server import side_by_side


def refitfsm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "refitfsm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="refitfsm run on a real server on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="refitfsm-"))
    for name, seed in (("A", 0), ("B", 1)):
        make(folder / name, seed)
    torch.cuda.empty_cache()
    packages = site()
    server, reference = (GpuServer(folder / name, packages=packages) for name in ("A", "B"))
    rows = []
    with kernels(options.kernels), side_by_side(server, reference):
        expected = {"A": fingerprint(server.url), "B": fingerprint(reference.url)}
        reference.stop()
        doctor = refitfsm("doctor", "--server", server.url, "--json")
        for number, names in enumerate(("B", "BA", "AB")):
            audit = folder / f"audit{number}.jsonl"
            weights = [part for name in names for part in ("--weights", str(folder / name))]
            done = refitfsm("run", "--server", server.url, *weights, "--audit", str(audit), "--json")
            verdict = refitfsm("audit", "verify", str(audit))
            rows.append(
                {
                    "weights": names,
                    "exit_status": done.returncode,
                    "result": json.loads(done.stdout or "null"),
                    "error": done.stderr[-2000:],
                    "audit_exit_status": verdict.returncode,
                    "right": fingerprint(server.url) == expected[names[-1]],
                }
            )
    good = doctor.returncode == 0 and expected["A"] != expected["B"]
    for row in rows:
        good = good and row["exit_status"] == row["audit_exit_status"] == 0 and bool(row["right"])
    result = {
        "what": "refitfsm run between safetensors checkpoints, weights as bytes, real memory saver",
        "command": "python3 -m tests.gpu.refit_command --out FILE.json",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"gpu": torch.cuda.get_device_name(0), "gpus": 1},
        "versions": {"sglang": "0.5.16", "torch": torch.__version__, "python": sys.version.split()[0]},
        "doctor": json.loads(doctor.stdout or "null"),
        "runs": rows,
        "good": good,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        print(f"{row['weights']}: exit {row['exit_status']}, right {row['right']} {row['error']}")
    print("GOOD" if good else "WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
