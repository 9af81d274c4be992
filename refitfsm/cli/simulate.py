"""`refitfsm simulate`: lives of a fleet with faults, each from a seed, judged by laws."""

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from refitfsm import policies
from refitfsm.cli.scenarios import play_files
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Json, Screen
from refitfsm.sim.faults import Kind
from refitfsm.sim.judged import LAWS
from refitfsm.sim.life import ABORTED, AFTER_RESTART, AS_IT_WAS, COMMITTED, REFUSED
from refitfsm.sim.swarm import SEEN, UNSEEN, Life, Lives, Total, play_seeds, total

HELP = (
    "Play whole lives of a simulated fleet under a policy, with faults, and judge them by laws.\n\n"
    "Controller, driver and journal are the real ones; servers die of what real ones die of, and the clock"
    " is virtual. Each life is refit cycles with faults between requests, then refits without faults that"
    " have to get through. Each seed draws which faults there may be and how often. Exits 1 if a law is"
    " broken, with the law, the seed, and the command that plays that life again.\n\n"
    "With --scenario, what a file or a folder of files says is played instead: nothing is drawn then, and of"
    " the other options only --trace and --json count."
)
EXAMPLES = f"""Examples:

refitfsm simulate

refitfsm simulate --policy ./my-policy.toml --servers 4 --cycles 10 --seeds 200

refitfsm simulate --policy always_on --fault kill --fault lose-answer --every 30 --json

refitfsm simulate --scenario simulations

refitfsm simulate --scenario simulations/f39-no-room-to-resume.toml --trace

Servers that lie ({", ".join(kind for kind in Kind if kind in UNSEEN)}) are played only where `--fault`
names them: what SGLang answers does not show them.
"""


def simulate(
    *,
    scenario: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="A scenario, or a folder of such: play what it says.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="With --scenario: print everything that was seen.")
    ] = False,
    policy: Annotated[
        str, typer.Option(metavar="P", help="A shipped policy's name, or a path.")
    ] = "colocated",
    servers: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="How many servers.")] = 3,
    cycles: Annotated[int, typer.Option(metavar="C", min=1, help="Cycles with faults in each life.")] = 5,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Of the first life.")] = 0,
    seeds: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="How many lives: seeds S, S+1 and so on.")
    ] = 20,
    fault: Annotated[
        list[Kind] | None,
        typer.Option(
            metavar="KIND",
            help="The faults of every life; may be given several times. Default: each life draws its own.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=2,
            help="One in K calls is befallen by a fault. Default: each life draws it.",
            show_default=False,
        ),
    ] = None,
    sglang_version: Annotated[
        str, typer.Option(metavar="V", help="What is simulated: 0.5.10 to 0.5.23.")
    ] = "0.5.23",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play them, and print how they went."""
    screen = Screen(as_json=as_json)
    if scenario is not None:
        raise typer.Exit(EXIT_OK if play_files(screen, scenario, trace=trace) else EXIT_NO)
    lives = Lives(policies.load(policy), servers, cycles, tuple(fault or ()), every or 0, sglang_version)
    began = time.perf_counter()
    played: list[Life] = []
    for life in play_seeds(lives, range(seed, seed + seeds)):
        played.append(life)
        screen.line(_line(life))
        for broken in life.played.broken:
            screen.line(f"    breaks {broken}")
        if life.played.broken:
            screen.line(f"    again: {_command(policy, lives, life.seed)}")
    summed = total(played)
    for text in _summary(summed, lives.kinds or SEEN, time.perf_counter() - began):
        screen.line(text)
    screen.result(
        {
            "good": not summed.broken,
            "policy": lives.policy.name,
            "servers": servers,
            "cycles": cycles,
            "runs": [_as_json(life) for life in played],
            "total": _total_json(summed),
        }
    )
    raise typer.Exit(EXIT_NO if summed.broken else EXIT_OK)


def _counts(counted: Counter[str]) -> str:
    """`kill 3, slow 1`, the most frequent first; equal ones by name."""
    ranked = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{what} {count:,}" for what, count in ranked if count) or "none"


def _endings(cycles: Counter[str]) -> str:
    return ", ".join(f"{cycles[ending]:,} {ending}" for ending in (COMMITTED, ABORTED, REFUSED))


def _line(life: Life) -> str:
    played, settings = life.played, life.settings
    may = f"1 call in {settings.every}" if settings.kinds else "no kinds drawn"
    healed = f"healed {played.healed}" if played.healed else "not healed"
    return (
        f"seed {life.seed}: refits {_endings(played.cycles)}; faults ({may}) {_counts(played.faults)};"
        f" {healed}; journal {played.journal_digest[:12]}"
    )


def _command(policy: str, lives: Lives, seed: int) -> str:
    words = ["refitfsm", "simulate", "--policy", policy, "--servers", str(lives.servers)]
    words += ["--cycles", str(lives.cycles), "--seed", str(seed), "--seeds", "1"]
    words += [word for kind in lives.kinds for word in ("--fault", kind.value)]
    words += ["--every", str(lives.every)] if lives.every else []
    words += ["--sglang-version", lives.sglang_version]
    return shlex.join(words)


def _summary(summed: Total, kinds: Sequence[Kind], wall_s: float) -> Iterator[str]:
    yield (
        f"lives: {summed.lives:,}; refits {_endings(summed.cycles)}; {summed.answers:,} answers,"
        f" {summed.records:,} records; {summed.virtual_s:,.0f} simulated s in {wall_s:.1f} s"
    )
    yield f"faults: {_counts(summed.faults)}"
    never = [kind.value for kind in kinds if not summed.faults[kind.value]]
    if never:
        yield f"faults that befell nobody: {', '.join(never)}"
    ways = ", ".join(f"{summed.healed[how]} {how}" for how in (AS_IT_WAS, AFTER_RESTART))
    left = summed.lives - summed.healed.total()
    yield f"healed: {ways}" + (f", {left} not" if left else "") + f"; {summed.restarts} restarts of the fleet"
    for law, risk in LAWS.items():
        count = summed.at_risk[law]
        yield f"{law}: " + (f"{count:,} times at risk ({risk})" if count else "never at risk: not tested")
    verdict = f"a law is broken in {summed.broken} of them" if summed.broken else "no law is broken"
    yield f"{verdict}; journals {summed.journal_digest[:12]}"


def _as_json(life: Life) -> Json:
    played, settings = life.played, life.settings
    return {
        "seed": life.seed,
        "kinds": [kind.value for kind in settings.kinds],
        "every": settings.every,
        "broken": list(played.broken),
        "refits": dict(sorted(played.cycles.items())),
        "faults": dict(sorted(played.faults.items())),
        "at_risk": {law: played.at_risk[law] for law in LAWS},
        "restarts": played.restarts,
        "healed": played.healed or None,
        "answers": played.answers,
        "records": played.records,
        "journal_digest": played.journal_digest,
        "virtual_s": round(played.virtual_s, 6),
    }


def _total_json(summed: Total) -> Json:
    return {
        "lives": summed.lives,
        "broken": summed.broken,
        "refits": dict(sorted(summed.cycles.items())),
        "faults": dict(sorted(summed.faults.items())),
        "at_risk": {law: summed.at_risk[law] for law in LAWS},
        "never_at_risk": list(summed.never_at_risk),
        "healed": {how: summed.healed[how] for how in (AS_IT_WAS, AFTER_RESTART)},
        "restarts": summed.restarts,
        "answers": summed.answers,
        "records": summed.records,
        "virtual_s": round(summed.virtual_s, 6),
        "journal_digest": summed.journal_digest,
    }
