"""Random sequences of calls on real SGLang servers on CPU and on the simulator, compared.

    python -m tests.real.differential --out FILE.json [--sequences N] [--first K] [--deaths D]

Sequences that kill are among them, D at most; there is a new server after each, and after a difference.
Prints each difference; ends with 1 if there is any.
"""

import argparse
import asyncio
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from refitfsm.sim.config import SimConfig
from refitfsm.sim.conformance.differential import Played, Sequenced, compare, planned
from refitfsm.sim.conformance.makers import checkpoints
from refitfsm.sim.conformance.report import all_alike, compared, comparison, comparison_summary
from refitfsm.weights.files import tiny_checkpoint
from tests.real.conformance import started
from tests.real.environment import ensure

CONFIG = SimConfig(sglang_version="0.5.23", memory_saver=True, device="cpu", skip_warmup=True)


async def life(sequences: Sequence[Sequenced]) -> list[Played]:
    """Play them."""
    python = ensure()
    with tempfile.TemporaryDirectory(prefix="refitfsm-") as folder:
        folders = [tiny_checkpoint(Path(folder) / name, seed=seed) for seed, name in enumerate("AB")]
        with checkpoints(folders) as sources:
            make = started(python, folders[0], sources, saver=True)
            return await compared(compare(make, sequences))


def arguments() -> argparse.ArgumentParser:
    """What both programs of this kind take."""
    parser = argparse.ArgumentParser(description="Random sequences, on real servers and on the simulator.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first sequence")
    parser.add_argument("--deaths", type=int, default=15, help="so many sequences that kill, at most")
    return parser


def drawn(options: argparse.Namespace, config: SimConfig) -> list[Sequenced]:
    """The sequences that the arguments ask for."""
    return planned(config, options.sequences, first=options.first, deaths_max=options.deaths)


def ended(played: Sequence[Played], out: Path, **known: object) -> int:
    """Write the result, and say how it was; the status to end with."""
    result = {
        **known,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **comparison(played),
        "good": all_alike(played),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(comparison_summary(played))
    return 0 if all_alike(played) else 1


def main() -> int:
    options = arguments().parse_args()
    return ended(
        asyncio.run(life(drawn(options, CONFIG))),
        options.out,
        what="random sequences of calls on real servers on CPU, compared with the simulator",
        command="python -m tests.real.differential --out FILE.json",
        machine={"cpus": os.cpu_count()},
        versions={"sglang": CONFIG.sglang_version, "python": sys.version.split()[0]},
    )


if __name__ == "__main__":
    sys.exit(main())
