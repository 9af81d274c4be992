"""`refitfsm simulate`: lives of a fleet with faults, each from a seed, judged by laws."""

from pathlib import Path
from typing import Annotated

import typer

from refitfsm import policies
from refitfsm.cli.lives import Asked, play_again, play_lives
from refitfsm.cli.scenarios import play_files
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Screen
from refitfsm.sim.faults import Kind
from refitfsm.sim.swarm import UNSEEN, Lives

HELP = (
    "Play whole lives of a simulated fleet under a policy, with faults, and judge them by laws.\n\n"
    "Controller, driver and journal are the real ones; servers die of what real ones die of, and the clock"
    " is virtual. Each life is refit cycles with faults between requests, then refits without faults that"
    " have to get through. Each seed draws which faults there may be and how often. Exits 1 if a law is"
    " broken, with the law, the seed, the command that plays that life again, and the shortest life found"
    " that breaks the same law, as a script.\n\n"
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
    servers: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="How many servers.")] = 3,
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
    planted: Annotated[
        str, typer.Option(metavar="NAME", help="A wrong planner of `refitfsm check --planted`, by its name.")
    ] = "",
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the shortest life that breaks a law there, as a file.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Play such a file instead, and nothing else.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play them, and print how they went."""
    screen = Screen(as_json=as_json)
    if scenario is not None:
        raise typer.Exit(EXIT_OK if play_files(screen, scenario, trace=trace) else EXIT_NO)
    if replay is not None:
        raise typer.Exit(play_again(screen, replay))
    lives = Lives(
        policies.load(policy), servers, cycles, tuple(fault or ()), every or 0, sglang_version, planted
    )
    raise typer.Exit(play_lives(screen, Asked(policy, lives, range(seed, seed + seeds), save)))
