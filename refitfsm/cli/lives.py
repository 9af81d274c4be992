"""Plays lives for `refitfsm simulate`, and prints how they went."""

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from refitfsm.cli.show import EXIT_NO, EXIT_OK, Json, Screen, write_text
from refitfsm.errors import ConfigError
from refitfsm.sim.faults import Kind
from refitfsm.sim.judged import LAWS
from refitfsm.sim.played import ABORTED, AFTER_RESTART, AS_IT_WAS, COMMITTED, REFUSED, Played
from refitfsm.sim.seeds import dumps, load, replay, stored
from refitfsm.sim.swarm import SEEN, Life, Lives, Total, play_seeds, shortest, total


class Asked(NamedTuple):
    """What the command was given."""

    policy: str
    """As it was written."""
    lives: Lives
    seeds: Sequence[int]
    save: Path | None


def play_lives(screen: Screen, asked: Asked) -> int:
    """Play them, and make short what breaks a law; the exit status."""
    lives = asked.lives
    began = time.perf_counter()
    played: list[Life] = []
    shortened: dict[str, Json] = {}
    for life in play_seeds(lives, asked.seeds):
        played.append(life)
        screen.line(_line(life))
        for broken in life.played.broken:
            screen.line(f"    breaks {broken}")
        if life.played.broken:
            screen.line(f"    again: {_command(asked, life.seed)}")
            law = life.played.laws[0]
            if law not in shortened:
                shortened[law] = _shortest(screen, asked, life.seed, law)
    summed = total(played)
    for text in _summary(summed, lives.kinds or SEEN, time.perf_counter() - began):
        screen.line(text)
    screen.result(
        {
            "good": not summed.broken,
            "policy": lives.policy.name,
            "servers": lives.servers,
            "cycles": lives.cycles,
            "runs": [_as_json(life) for life in played],
            "total": _total_json(summed),
            "shortest": shortened,
        }
    )
    return EXIT_NO if summed.broken else EXIT_OK


def _shortest(screen: Screen, asked: Asked, seed: int, law: str) -> Json:
    """Find it, print it, and keep it if that was asked for."""
    shrunk = shortest(asked.lives, seed, law)
    settings = shrunk.settings
    screen.line(
        f"    the shortest that breaks {law}, of {shrunk.plays} tried:"
        f" servers {settings.servers}, cycles {settings.cycles}"
    )
    _script(screen, shrunk.played)
    file = ""
    if asked.save is not None:
        file = _saved(asked.save / f"{law}-{seed}.toml")
        write_text(Path(file), dumps(stored(shrunk, law, asked.policy, asked.lives.planted)))
        screen.line(f"    kept in {file}; play it with: refitfsm simulate --replay {shlex.quote(file)}")
    return {
        "seed": seed,
        "servers": settings.servers,
        "cycles": settings.cycles,
        "script": list(shrunk.played.script),
        "broken": list(shrunk.played.broken),
        "choices": dict(shrunk.script),
        "file": file or None,
    }


def _saved(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent}: cannot be made: {error.strerror}; give another folder") from error
    return str(path)


def _script(screen: Screen, played: Played) -> None:
    for line in played.script:
        screen.line(f"    {line}")
    for broken in played.broken:
        screen.line(f"        breaks {broken}")


def play_again(screen: Screen, file: Path) -> int:
    """Play a life that was kept, with what is planted in it; the exit status."""
    what = load(file)
    played = replay(what)
    screen.line(f"{file.name}: {what.shows}")
    _script(screen, played)
    holds = what.law not in played.laws
    screen.line(f"{what.law} {'holds' if holds else 'is broken'}")
    screen.result({"good": not played.broken, "law": what.law, "holds": holds, "broken": list(played.broken)})
    return EXIT_NO if played.broken else EXIT_OK


def _counts(counted: Counter[str]) -> str:
    """`kill 3, slow 1`, the most frequent first; equal ones by name."""
    ranked = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{what} {count:,}" for what, count in ranked if count) or "none"


def _endings(cycles: Counter[str]) -> str:
    return ", ".join(f"{cycles[ending]:,} {ending}" for ending in (COMMITTED, ABORTED, REFUSED))


def _line(life: Life) -> str:
    played, settings = life.played, life.settings
    where = f" of {settings.paths[0]}" if settings.paths else ""
    may = f"1 call in {settings.every}{where}" if settings.kinds else "no kinds drawn"
    healed = f"healed {played.healed}" if played.healed else "not healed"
    return (
        f"seed {life.seed}: refits {_endings(played.cycles)}; faults ({may}) {_counts(played.faults)};"
        f" {healed}; journal {played.journal_digest[:12]}"
    )


def _command(asked: Asked, seed: int) -> str:
    lives = asked.lives
    words = ["refitfsm", "simulate", "--policy", asked.policy, "--servers", str(lives.servers)]
    words += ["--cycles", str(lives.cycles), "--seed", str(seed), "--seeds", "1"]
    words += [word for kind in lives.kinds for word in ("--fault", kind.value)]
    words += ["--every", str(lives.every)] if lives.every else []
    words += ["--sglang-version", lives.sglang_version]
    words += ["--planted", lives.planted] if lives.planted else []
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
        "paths": list(settings.paths),
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
