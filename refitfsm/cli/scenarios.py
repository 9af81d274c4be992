"""`refitfsm simulate --scenario`: scenarios from files, and how each went."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from refitfsm.cli.show import Json, Screen
from refitfsm.sim.scenario import files, load
from refitfsm.sim.scenario_play import Played, Told, tell


class Entry(NamedTuple):
    """A scenario's file, and how it went."""

    file: str
    told: Told

    @property
    def verdict(self) -> str:
        """`holds`, `is open`, or `fails`."""
        if self.told.wrong:
            return "fails"
        return "is open" if self.told.scenario.open else "holds"


def play_files(screen: Screen, path: Path, *, trace: bool) -> bool:
    """Play a file's scenario, or a folder's, and print how they went; whether all went as they had to.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    began = time.perf_counter()
    entries = []
    for file in files(path):
        entry = Entry(file.stem, tell(load(file)))
        entries.append(entry)
        for text in _lines(entry, trace=trace):
            screen.line(text)
    screen.line(_summary(entries, time.perf_counter() - began))
    good = all(entry.verdict != "fails" for entry in entries)
    screen.result({"good": good, "scenarios": [_as_json(entry) for entry in entries]})
    return good


def _plays(told: Told) -> Iterator[tuple[str, Played]]:
    for name, played in (("by hand", told.by_hand), ("fleet", told.fleet)):
        if played is not None:
            yield name, played


def _lines(entry: Entry, *, trace: bool) -> Iterator[str]:
    told = entry.told
    yield f"{entry.file}: {entry.verdict} ({', '.join(told.scenario.ids)}: {told.scenario.name})"
    for text in told.wrong:
        yield f"    {text}"
    if entry.verdict == "is open":
        yield f"    {' '.join(told.scenario.open.split())}"
        yield from (f"    now: {text}" for text in (told.fleet.wrong if told.fleet else ())[:1])
    if trace:
        for name, played in _plays(told):
            yield f"    {name}:"
            yield from (f"        {sight}" for sight in played.seen)


def _strikes(entry: Entry) -> int:
    return sum(sight.name == "fault_strikes" for _, played in _plays(entry.told) for sight in played.seen)


def _summary(entries: list[Entry], wall_s: float) -> str:
    counts = [
        f"{sum(entry.verdict == verdict for entry in entries)} {word}"
        for verdict, word in (("holds", "hold"), ("is open", "open"), ("fails", "fail"))
    ]
    simulated_s = sum(played.seconds for entry in entries for _, played in _plays(entry.told))
    strikes = sum(map(_strikes, entries))
    return (
        f"scenarios: {', '.join(counts)}; {strikes} faults befell calls;"
        f" {simulated_s:,.0f} simulated s in {wall_s:.1f} s"
    )


def _as_json(entry: Entry) -> Json:
    told = entry.told
    return {
        "file": entry.file,
        "name": told.scenario.name,
        "ids": list(told.scenario.ids),
        "verdict": entry.verdict,
        "open": " ".join(told.scenario.open.split()) or None,
        "wrong": list(told.wrong),
        "faults": _strikes(entry),
        "virtual_s": {name: round(played.seconds, 6) for name, played in _plays(told)},
    }
