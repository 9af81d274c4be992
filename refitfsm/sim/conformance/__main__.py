"""Says how a server differs from what SGLang is taken to do.

    python -m refitfsm.sim.conformance --sim 0.5.23
    python -m refitfsm.sim.conformance --url http://127.0.0.1:30000 --weights SERVED OTHER

A simulated server is checked in this process, and a fresh one is made for each check that kills. A server
at a URL is used, and gets its own weights back; checks that kill are skipped there. Ends with 1 if a check
fails.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from refitfsm.sim.config import SimConfig
from refitfsm.sim.conformance.catalogue import EVERY
from refitfsm.sim.conformance.makers import checkpoints, connected, simulated
from refitfsm.sim.conformance.registry import Check
from refitfsm.sim.conformance.report import as_rows, none_failed, shown, summary
from refitfsm.sim.conformance.runner import Outcome, play_all, play_shared
from refitfsm.sim.loop import run


async def _at(url: str, folders: Sequence[Path], checks: Sequence[Check]) -> list[Outcome]:
    with checkpoints(folders) as sources:
        async with connected(url, sources) as subject:
            return await shown(play_shared(subject, checks))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m refitfsm.sim.conformance",
        description="Checks whether a server does what SGLang is taken to do.",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--sim", metavar="VERSION", help="a simulated server of this SGLang release")
    where.add_argument("--url", help="a running server that nobody else uses")
    parser.add_argument("--weights", nargs=2, type=Path, metavar=("SERVED", "OTHER"), help="with --url")
    parser.add_argument("--no-memory-saver", action="store_true", help="with --sim")
    parser.add_argument("--no-slow", action="store_true", help="leave out what takes 20 s on a real server")
    parser.add_argument("--only", metavar="TEXT", default="", help="checks whose name contains this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outcomes as JSON")
    options = parser.parse_args(arguments)
    checks = [check for check in EVERY if options.only in check.name and not (options.no_slow and check.slow)]
    if not checks:
        parser.error(f"--only: no check has {options.only!r} in its name")
    if options.sim:
        config = SimConfig(
            sglang_version=options.sim, memory_saver=not options.no_memory_saver, skip_warmup=True
        )
        outcomes = run(shown(play_all(simulated(config), checks)))
    elif options.weights is None:
        parser.error("--url: give --weights, the checkpoint that is served and another one for its model")
    else:
        outcomes = asyncio.run(_at(options.url, options.weights, checks))
    sys.stdout.write(f"{summary(outcomes)}\n")
    if options.out is not None:
        options.out.write_text(json.dumps(as_rows(outcomes), indent=2) + "\n")
    return 0 if none_failed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
