"""Every conformance check on real SGLang servers on CPU, with the memory saver's stand-in and without.

    python -m tests.real.conformance --out FILE.json [--only TEXT]

One server takes the harmless checks in turn; after a failure, and for each lethal check, there is a new one.
Prints a line for each check; ends with 1 if any fails.
"""

import argparse
import asyncio
import datetime
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from refitfsm.sim.conformance.catalogue import EVERY
from refitfsm.sim.conformance.makers import checkpoints, connected
from refitfsm.sim.conformance.registry import Need
from refitfsm.sim.conformance.report import as_rows, none_failed, shown, summary
from refitfsm.sim.conformance.runner import Maker, Outcome, play_all
from refitfsm.sim.conformance.subject import Subject
from refitfsm.weights.files import tiny_checkpoint
from refitfsm.weights.source import CheckpointSource
from tests.real.environment import ensure
from tests.real.server import RealServer


def started(python: Path, model: Path, sources: Sequence[CheckpointSource], *, saver: bool) -> Maker:
    """Makes real servers. One that a check should have killed, and that lives, is stopped."""

    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        with RealServer(python, model, memory_saver=saver) as server:
            async with connected(server.url, sources) as subject:
                yield subject

    return make


async def life(only: str) -> dict[str, list[Outcome]]:
    """Play all whose names contain a text."""
    python = ensure()
    checks = [check for check in EVERY if only in check.name]
    bare = [check for check in checks if check.needs is Need.NO_SAVER]
    with tempfile.TemporaryDirectory(prefix="refitfsm-") as folder:
        folders = [tiny_checkpoint(Path(folder) / name, seed=seed) for seed, name in enumerate("AB")]
        with checkpoints(folders) as sources:
            saver = started(python, folders[0], sources, saver=True)
            without = started(python, folders[0], sources, saver=False)
            return {
                "memory saver's stand-in": await shown(play_all(saver, checks)),
                "no memory saver": await shown(play_all(without, bare)),
            }


def main() -> int:
    parser = argparse.ArgumentParser(description="Every conformance check on real servers on CPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", metavar="TEXT", default="", help="checks whose name contains this")
    options = parser.parse_args()
    found = asyncio.run(life(options.only))
    every = [outcome for outcomes in found.values() for outcome in outcomes]
    result = {
        "what": "conformance checks on real servers on CPU",
        "command": "python -m tests.real.conformance --out FILE.json",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count()},
        "versions": {"sglang": "0.5.23", "python": sys.version.split()[0]},
        "servers": {name: as_rows(outcomes) for name, outcomes in found.items()},
        "summary": summary(every),
        "good": none_failed(every),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(summary(every))
    return 0 if none_failed(every) else 1


if __name__ == "__main__":
    sys.exit(main())
