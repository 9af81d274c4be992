"""Says how a server differs from what SGLang is taken to do.

    python -m refitfsm.sim.conformance --sim 0.5.23
    python -m refitfsm.sim.conformance --url http://127.0.0.1:30000 --weights SERVED OTHER [--random 200]

A simulated server is checked in this process, and a fresh one is made for each check that kills. A server
at a URL is used, and gets its own weights back; checks that kill are skipped there. Instead of the checks,
random sequences of calls can be played to it, none that kills, and compared with the simulator of its
release, up to the first that differs. Ends with 1 if a check fails or a sequence differs.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from refitfsm.model.values import Capabilities
from refitfsm.sim.config import SimConfig
from refitfsm.sim.conformance.catalogue import EVERY
from refitfsm.sim.conformance.differential import Played, Sequenced, compare_shared, planned, twin
from refitfsm.sim.conformance.makers import checkpoints, connected, simulated
from refitfsm.sim.conformance.registry import Check
from refitfsm.sim.conformance.report import (
    all_alike,
    as_rows,
    compared,
    comparison,
    comparison_summary,
    none_failed,
    shown,
    summary,
)
from refitfsm.sim.conformance.runner import Outcome, play_all, play_shared
from refitfsm.sim.loop import run


async def _at(url: str, folders: Sequence[Path], checks: Sequence[Check]) -> list[Outcome]:
    with checkpoints(folders) as sources:
        async with connected(url, sources) as subject:
            return await shown(play_shared(subject, checks))


async def _enrolled(url: str, folders: Sequence[Path]) -> Capabilities:
    with checkpoints(folders) as sources:
        async with connected(url, sources) as subject:
            await subject.enrol()
            return subject.capabilities


async def _compared_at(url: str, folders: Sequence[Path], sequences: Sequence[Sequenced]) -> list[Played]:
    with checkpoints(folders) as sources:
        async with connected(url, sources) as subject:
            return await compared(compare_shared(subject, sequences))


def _random(url: str, folders: Sequence[Path], numbers: range, out: Path | None) -> int:
    config = twin(asyncio.run(_enrolled(url, folders)))
    sequences = planned(config, len(numbers), first=numbers.start, deaths_max=0)
    played = asyncio.run(_compared_at(url, folders, sequences))
    _end(comparison_summary(played), comparison(played), out)
    whole = len(played) == len(sequences)
    if not whole and all_alike(played):
        sys.stdout.write(f"after sequence {played[-1].sequence.number} the server could not be put back\n")
    return 0 if whole and all_alike(played) else 1


def _end(line: str, result: object, out: Path | None) -> None:
    sys.stdout.write(f"{line}\n")
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")


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
    parser.add_argument("--random", type=int, metavar="N", help="with --url: so many random sequences")
    parser.add_argument(
        "--first", type=int, default=0, metavar="K", help="with --random: from this number on"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outcomes as JSON")
    options = parser.parse_args(arguments)
    checks = [check for check in EVERY if options.only in check.name and not (options.no_slow and check.slow)]
    if not checks:
        parser.error(f"--only: no check has {options.only!r} in its name")
    if options.url and options.weights is None:
        parser.error("--url: give --weights, the checkpoint that is served and another one for its model")
    if options.random is not None:
        if not options.url:
            parser.error("--random: give the --url of a server to compare the simulator with")
        numbers = range(options.first, options.first + options.random)
        return _random(options.url, options.weights, numbers, options.out)
    if options.sim:
        config = SimConfig(
            sglang_version=options.sim, memory_saver=not options.no_memory_saver, skip_warmup=True
        )
        outcomes = run(shown(play_all(simulated(config), checks)))
    else:
        outcomes = asyncio.run(_at(options.url, options.weights, checks))
    _end(summary(outcomes), as_rows(outcomes), options.out)
    return 0 if none_failed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
