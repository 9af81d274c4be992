"""How long weights of a Qwen3-8B take from a trainer's GPU memory into real servers, by each way of pushing.

    python3 -m tests.gpu.push_benchmark --out FILE.json [--kernels ARCHIVE] [--repeats N] [--model NAME]

All in one run, so that ratios mean something: a plain copy on the same GPU, each strategy on one server with
its checksums compared, whole colocated cycles with one server and with two, and memory and handles of both
sides after each of fifty cycles. A time ends when the memory that was lent has come back, which the server
counts down only after its copies are done. Prints a table last; ends with 1 if any content was wrong or
anything was left over.
"""

import argparse
import asyncio
import datetime
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable
from pathlib import Path

import pynvml
import torch

from refitfsm.server import LOADER
from refitfsm.weights.plan import PushWish, Strategy
from tests.gpu.cycle_measures import TRAIN_S, cycles, life
from tests.gpu.models import QWEN3_8B, QWEN3_TINY, Qwen3
from tests.gpu.push_measures import Row, Weights, careless, copies, plainest, variant
from tests.gpu.server import GpuServer, kernels, site
from tests.real.server import call, side_by_side

MODELS = {"qwen3-8b": QWEN3_8B, "tiny": QWEN3_TINY}
LIFE = (
    "cycles_list",
    "cycles",
    "cycles_at_once",
    "cycles_content",
    "cycles_two_servers",
    "fifty_cycles_list",
    "fifty_cycles",
)


async def attempted(work: Awaitable[Row], name: str) -> Row:
    """The rest of a run is worth having when one part of it fails."""
    try:
        return await work
    except Exception:  # noqa: BLE001
        return {"name": name, "error": traceback.format_exc()}


def counted(weights: Weights) -> dict[str, int]:
    """How many tensors are lent by how many counts, as long as nobody has taken them."""
    replica = weights.source._replicas[0]
    lent = replica.memory.lend(replica.tensors)
    held = sum(not counter.is_back() for counter in lent.counters)
    for counter in lent.counters:
        counter.write_off()
    return {"tensors": len(lent.values), "allocations": len(lent.counters), "held": held}


async def measure(
    servers: list[GpuServer], model: Qwen3, tp: int, repeats: int, result: dict[str, object]
) -> None:
    url = servers[0].url
    devices = [f"cuda:{rank}" for rank in range(tp)]
    apart = Weights.of(*(model.separate(device) for device in devices))
    together = Weights.of(*(model.in_one(device) for device in devices))
    apart.fill(1)
    together.fill(2)
    result["weight_bytes"] = apart.source.manifest.nbytes
    result["copies_s"] = copies(apart.replicas[0], together.replicas[0], repeats)
    result["counters"] = counted(apart)
    rows: list[Row] = []
    result["variants"] = rows
    byhand = careless(url, apart)
    row, expected = await plainest(url, apart, PushWish(Strategy.TENSOR))
    rows += [byhand | {"content_right": byhand.pop("content") == expected[1]}, row]

    async def measured(name: str, weights: Weights, wish: PushWish) -> None:
        fresh = wish.strategy is Strategy.REGISTERED
        work = variant(name, url, weights, wish, repeats=repeats, expected=expected, fresh=fresh)
        rows.append(await attempted(work, name))

    async def lived(name: str, work: Awaitable[Row]) -> None:
        result[name] = await attempted(work, name)

    await measured("list", apart, PushWish(Strategy.LIST))
    await measured("list, one allocation", together, PushWish(Strategy.LIST))
    await measured("bucket, 2 x 0.5 GiB", apart, PushWish(Strategy.BUCKET, bucket_bytes=512 << 20, buffers=2))
    await measured("bucket, 1 x 1 GiB", apart, PushWish(Strategy.BUCKET, bucket_bytes=1 << 30, buffers=1))
    await measured("mixed", apart, PushWish(Strategy.MIXED))
    # Before anything is registered: what a server has mapped for good it need not map for a list.
    one, listed, registered = servers[:1], "colocated_list", "colocated_registered"
    await lived("cycles_list", cycles(one, apart, expected, policy=listed, count=5, train_s=TRAIN_S))
    await lived("fifty_cycles_list", life(servers[0], apart, policy=listed, count=50))
    await measured("registered", apart, PushWish(Strategy.REGISTERED))
    await measured("registered, one allocation", together, PushWish(Strategy.REGISTERED))
    await lived("cycles", cycles(one, apart, expected, policy=registered, count=5, train_s=TRAIN_S))
    await lived("cycles_at_once", cycles(one, apart, expected, policy=registered, count=5, train_s=0))
    await lived(
        "cycles_content", cycles(one, apart, expected, policy="colocated_content", count=3, train_s=0)
    )
    await lived("fifty_cycles", life(servers[0], apart, policy=registered, count=50))
    for server in servers:  # a fleet begins with one label
        call(server.url, "/update_weight_version", {"new_version": "before", "abort_all_requests": False})
    await lived(
        "cycles_two_servers", cycles(servers, apart, expected, policy=registered, count=4, train_s=TRAIN_S)
    )
    apart.source.close()
    together.source.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure every way of pushing weights on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tp", type=int, default=1, help="ranks of each server, each on a GPU of its own")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    options = parser.parse_args()
    pynvml.nvmlInit()
    folder = MODELS[options.model].write_config(Path(tempfile.mkdtemp(prefix="refitfsm-")))
    packages = site()
    flags = ["--load-format", "dummy", "--custom-weight-loader", LOADER]
    root = str(Path(__file__).resolve().parents[2])
    env = {"PYTHONPATH": f"{packages}:{root}"}
    servers = [
        GpuServer(
            folder,
            packages=packages,
            flags=flags,
            env=env,
            tp=options.tp,
            mem_fraction_static=fraction,
            max_total_tokens=tokens,
        )
        for fraction, tokens in ((0.85, 320_000), (0.85, 32_768))
    ]
    result: dict[str, object] = {
        "what": "ways to push weights; colocated cycles; memory and handles over fifty cycles",
        "command": "python3 -m tests.gpu.push_benchmark --out FILE.json",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"gpu": torch.cuda.get_device_name(0), "gpus": options.tp},
        "versions": {"sglang": "0.5.16", "torch": torch.__version__, "python": sys.version.split()[0]},
        "model": options.model,
        "tp": options.tp,
    }
    began = time.monotonic()
    with kernels(options.kernels), side_by_side(*servers):
        result["servers_start_s"] = round(time.monotonic() - began, 1)
        try:
            asyncio.run(measure(servers, MODELS[options.model], options.tp, options.repeats, result))
        except Exception:  # noqa: BLE001 - what was measured is written all the same
            result["error"] = traceback.format_exc()
        result["server_log_end"] = (
            servers[0].log[-3000:] if "error" in json.dumps(result, default=str) else ""
        )
        result["seconds"] = round(time.monotonic() - began, 1)
        options.out.write_text(json.dumps(result, indent=2, default=str) + "\n")
    return report(result)


def report(result: dict[str, object]) -> int:
    """Print the table; 1 if any content was wrong or anything failed."""
    print(
        json.dumps(
            {
                key: result[key]
                for key in ("servers_start_s", "seconds", "weight_bytes", "counters", "copies_s")
                if key in result
            }
        )
    )
    bad = "error" in result
    slowest = max((row.get("median_s", 0) for row in result.get("variants", [])), default=0)  # type: ignore[attr-defined]
    for row in result.get("variants", []):  # type: ignore[attr-defined]
        if "error" in row:
            bad = True
            print(f"{row['name']}: {row['error'][-700:]}")
            continue
        bad = bad or row["content_right"] is False
        parts = " ".join(
            f"{part} {value * 1000:.1f}" for part, value in row["parts_s"].items() if part != "pushes"
        )
        print(
            f"{row['name']:28} median {row['median_s'] * 1000:8.1f} ms"
            f"  x{slowest / row['median_s']:6.1f}  extra {row['extra_bytes'] / 1e9:5.2f} GB"
            f"  content {row['content_right']}  leases {row['open_leases']}  ({parts})"
        )
    for name in LIFE:
        found = result.get(name, {})
        bad = bad or "error" in found  # type: ignore[operator]
        for row in found.get("cycles", [found]):  # type: ignore[attr-defined]
            print(name, json.dumps(row, default=str)[-900:])
            bad = bad or not all(row.get("content_right", [row.get("clean", True)]))
    if "error" in result:
        print(result["error"])
    print("WRONG" if bad else "GOOD")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
