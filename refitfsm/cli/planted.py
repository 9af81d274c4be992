"""`refitfsm check --planted` and `--canary`: the planners that are wrong on purpose, found or not."""

from collections.abc import Sequence

from refitfsm.check.planted.mistake import Mistake, look
from refitfsm.check.script import script
from refitfsm.check.search import Result
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Json, Screen


def find(screen: Screen, mistakes: Sequence[Mistake]) -> int:
    """Look for each, and print what law it breaks and after how many moves; for a single one also the way.

    Returns the exit status: that of a success if every one is found.
    """
    found: list[Json] = []
    missed = 0
    for mistake in mistakes:
        result = look(mistake)
        missed += result.broken is None
        for line in _lines(mistake, result):
            screen.line(line)
        found.append(_as_json(mistake, result))
        if result.broken is not None and len(mistakes) == 1:
            for line in script(result.broken):
                screen.line(line)
    screen.line(f"{len(mistakes) - missed} of {len(mistakes)} planners that are wrong on purpose found")
    screen.result({"good": missed == 0, "planted": found})
    return EXIT_NO if missed else EXIT_OK


def _lines(mistake: Mistake, result: Result) -> tuple[str, str]:
    bounds = mistake.bounds
    head = f"{mistake.kind}: {mistake.name} ({', '.join(mistake.reports)})"
    where = f"{bounds.servers} servers, {bounds.faults} faults, {bounds.policy}, {bounds.servers_are}"
    if result.broken is None:
        return head, f"    NOT FOUND in {result.states} states: {where}"
    law = result.broken.law.partition(":")[0]
    moves = len(result.broken.trace)
    return head, f"    breaks {law} after {moves} moves, {result.seconds:.2f} s: {where}"


def _as_json(mistake: Mistake, result: Result) -> Json:
    return {
        "name": mistake.name,
        "kind": mistake.kind,
        "reports": list(mistake.reports),
        "says": mistake.says,
        "servers": mistake.bounds.servers,
        "faults": mistake.bounds.faults,
        "policy": mistake.bounds.policy,
        "servers_are": mistake.bounds.servers_are,
        "law": result.broken.law if result.broken else None,
        "moves": len(result.broken.trace) if result.broken else None,
        "states": result.states,
        "seconds": round(result.seconds, 3),
    }
