"""Lives that broke a law once, as files: what to play, and the law that must hold now.

A file is TOML. `simulations/README.md` says what each key means. Unknown keys are refused.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from refitfsm import policies
from refitfsm.errors import ConfigError
from refitfsm.sim.choices import ScriptedChooser
from refitfsm.sim.chosen import answers
from refitfsm.sim.faults import parse_fault
from refitfsm.sim.judged import LAWS
from refitfsm.sim.life import play
from refitfsm.sim.planted import controls_of
from refitfsm.sim.played import Played, Settings
from refitfsm.sim.shrink import Shrunk, is_of_a_fault

Count = Annotated[int, msgspec.Meta(ge=1)]


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file."""

    law: str
    """What was broken, and must hold now."""
    shows: str
    """How it was broken then, or any sentence about it."""
    planted: str = ""
    """The planner that is wrong on purpose and breaks the law; empty: it was the one that ships."""
    policy: str = "colocated"
    """A shipped policy's name, or a path."""
    sglang_version: str = "0.5.23"
    servers: Count = 1
    cycles: Count = 1
    faults: dict[str, tuple[str, ...]] = {}
    """By server, as `refitfsm.sim.faults` writes them; a call is counted while there may be faults."""
    choices: dict[str, Annotated[int, msgspec.Meta(ge=1)]] = {}
    """All else that was not calm: see `refitfsm.sim.choices.Recorder.script`."""


def stored(shrunk: Shrunk, law: str, policy: str, planted: str = "") -> Stored:
    """What a file says of a life; `policy` and `planted` are as the user gave them."""
    faults: dict[str, list[str]] = {}
    for server, fault in shrunk.played.befallen:
        faults.setdefault(server, []).append(fault.spec)
    return Stored(
        law=law,
        shows=next(broken for broken in shrunk.played.broken if broken.startswith(f"{law}: ")),
        planted=planted,
        policy=policy,
        sglang_version=shrunk.settings.sglang_version,
        servers=shrunk.settings.servers,
        cycles=shrunk.settings.cycles,
        faults={server: tuple(specs) for server, specs in faults.items()},
        choices={what: picked for what, picked in shrunk.script.items() if not is_of_a_fault(what)},
    )


def dumps(what: Stored) -> str:
    """The text of a file."""
    data = msgspec.to_builtins(what)
    tables = {key: data.pop(key) for key in ("faults", "choices")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items() if (key, value) != ("planted", "")]
    for name, table in tables.items():
        if table:
            lines += ["", f"[{name}]", *_entries(table)]
    return "\n".join(lines) + "\n"


def _entries(table: Mapping[str, object]) -> list[str]:
    """A string of JSON is one of TOML, and so is a list of them."""
    return [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items()]


def load(path: Path) -> Stored:
    """A stored life.

    Raises:
        ConfigError: it cannot be read, a key is unknown, or a value is wrong.
    """
    try:
        what = msgspec.convert(tomllib.loads(path.read_text("utf-8")), Stored)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"seed {path}: cannot be read: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"seed {path}: {error}; simulations/README.md has the keys") from None
    if what.law not in LAWS:
        raise ConfigError(f"seed {path}: {what.law!r} is no law; there are {', '.join(LAWS)}")
    return what


def replay(what: Stored, *, planted: bool = True) -> Played:
    """Play it; without what is `planted`, the planner that ships.

    Raises:
        ConfigError: its policy, planner or release is not there, or a fault is none that a life has.
    """
    script = dict(what.choices)
    try:
        faults = {server: list(map(parse_fault, specs)) for server, specs in what.faults.items()}
        kinds = tuple(dict.fromkeys(fault.kind for each in faults.values() for fault in each))
        for server, each in faults.items():
            script.update(answers(server, each, kinds))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    settings = Settings(
        policies.load(what.policy),
        what.servers,
        what.cycles,
        kinds,
        every=2,
        sglang_version=what.sglang_version,
        controls=controls_of(what.planted if planted else ""),
    )
    return play(settings, ScriptedChooser(script))
