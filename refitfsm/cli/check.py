"""`refitfsm check`: every interleaving of a small fleet under a policy."""

from typing import Annotated

import typer

from refitfsm import policies
from refitfsm.check.apart import Apart, apart
from refitfsm.check.planted.catalogue import MISTAKES
from refitfsm.check.planted.catalogue import canary as drawn
from refitfsm.check.script import script
from refitfsm.check.search import Result, Seen, search
from refitfsm.check.worlds import Named, worlds
from refitfsm.cli.planted import find
from refitfsm.cli.seen import never, plain, shown
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Json, Screen

HELP = (
    "Try everything that can happen to a small fleet under a policy, and judge every state by the laws.\n\n"
    "The planner is the real one; servers are abstract, and die of what real ones die of. Goals are asked for"
    " in every order, answers come in every order, and each fault may befall each command, up to the number"
    " given. Exits 1 if a law is broken, with the shortest way there."
)
EXAMPLES = """Examples:

refitfsm check

refitfsm check --policy ./my-policy.toml --servers 2 --faults 2

refitfsm check --policy colocated --servers 1 --faults 3 --json

refitfsm check --apart --servers 3 --faults 3

refitfsm check --planted

refitfsm check --canary "$(git rev-parse HEAD)"
"""


def check(
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="May be given several times. Default: all that ship.",
            show_default=False,
        ),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, max=5, help="How many servers.")] = 2,
    faults: Annotated[int, typer.Option(min=0, max=9, help="How many faults there may be.")] = 1,
    states_max: Annotated[int, typer.Option(min=1, help="Give up after so many states.")] = 2_000_000,
    servers_apart: Annotated[
        bool,
        typer.Option(
            "--apart",
            help="Look at each server beside what the fleet knows as one: bigger fleets and more faults,"
            " without the way to what breaks a law.",
        ),
    ] = False,
    planted: Annotated[
        bool, typer.Option("--planted", help="Instead: find every planner that is wrong on purpose.")
    ] = False,
    canary: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Instead: find one of them, drawn by this text.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search, and print what was found."""
    screen = Screen(as_json=as_json)
    if planted or canary is not None:
        raise typer.Exit(find(screen, MISTAKES if planted else (drawn(canary or ""),)))
    seen = Seen()
    found: list[Json] = []
    good = True
    for name in policy or policies.shipped():
        named = policies.load(name)
        for kind in worlds(named.rules):
            if servers_apart:
                alone = apart(servers, faults, kind.world)
                seen.update(alone.seen)
                good = good and alone.good
                _print_apart(screen, named.name, kind, alone)
                found.append(_apart_json(named.name, kind, alone))
                continue
            result = search(servers, faults, kind.world, states_max=states_max)
            seen.update(result.seen)
            good = good and result.broken is None and result.complete
            _print(screen, named.name, kind, result)
            found.append(_as_json(named.name, kind, result))
    for line in shown(seen):
        screen.line(line)
    screen.result(
        {
            "servers": servers,
            "faults": faults,
            "good": good,
            "runs": found,
            "never": never(seen),
            **plain(seen),
        }
    )
    raise typer.Exit(EXIT_OK if good else EXIT_NO)


def _print(screen: Screen, policy: str, kind: Named, result: Result) -> None:
    verdict = "every law holds" if result.complete else "not all states were reached"
    screen.line(
        f"{policy} ({kind.name}): {result.states:,} states, {result.edges:,} moves, {result.depth} deep,"
        f" {result.seconds:.1f} s: {'a law is broken' if result.broken else verdict}"
    )
    for line in script(result.broken) if result.broken else ():
        screen.line(line)


def _print_apart(screen: Screen, policy: str, kind: Named, result: Apart) -> None:
    verdict = "every law holds"
    if result.broken:
        verdict = f"a law may be broken: {result.broken} Search fewer servers or faults without --apart."
    elif result.entangled:
        verdict = f"servers cannot be taken apart, search without --apart: {result.entangled}"
    screen.line(
        f"{policy} ({kind.name}): {result.states:,} states of a server in {result.situations:,} situations"
        f" of the fleet, {result.steps:,} steps and {result.calm:,} calm ones, {result.seconds:.1f} s:"
        f" {verdict}"
    )


def _as_json(policy: str, kind: Named, result: Result) -> Json:
    return {
        "policy": policy,
        "servers_are": kind.name,
        "states": result.states,
        "moves": result.edges,
        "depth": result.depth,
        "seconds": round(result.seconds, 3),
        "complete": result.complete,
        "broken": result.broken.law if result.broken else None,
        "script": list(script(result.broken)) if result.broken else [],
        **plain(result.seen),
    }


def _apart_json(policy: str, kind: Named, found: Apart) -> Json:
    return {
        "policy": policy,
        "servers_are": kind.name,
        "states": found.states,
        "steps": found.steps,
        "calm_steps": found.calm,
        "situations": found.situations,
        "seconds": round(found.seconds, 3),
        "broken": found.broken or None,
        "entangled": found.entangled or None,
        **plain(found.seen),
    }
