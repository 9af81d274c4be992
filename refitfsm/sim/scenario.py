"""Scenarios: what went wrong somewhere, or may, as a file that can be played.

A scenario is a TOML file. It says what is done to a few simulated servers, by whom, with which faults, and
what must never and what must sometimes be seen. It has one or two plays: `[by_hand]` is a client without
refitfsm, which shows what goes wrong, and `[fleet]` is the same intention through refitfsm. Unknown keys are
refused. `simulations/README.md` says what each means.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from refitfsm.errors import ConfigError
from refitfsm.sim.faults import Fault, parse_fault
from refitfsm.sim.scenario_sights import LAWS, Wanted
from refitfsm.sim.scenario_steps import AnyStep, Arm, Connect, FleetStep, GiveBack, OfServer, Raw, Take, flat

PATHS: Final = {
    "enrol": "/update_weight_version",
    "pause": "/pause_generation",
    "flush": "/flush_cache",
    "release": "/release_memory_occupation",
    "resume": "/resume_memory_occupation",
    "begin": "/begin_weight_update",
    "push": "/update_weights_from_tensor",
    "end": "/end_weight_update",
    "verify": "/weights_checker",
    "continue": "/continue_generation",
}
"""The call that makes most of a command: in a fault, `lose-answer@release` is one at that path."""


class Servers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The servers `s0`, `s1` and so on, all started alike."""

    count: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """How many."""
    sglang_version: str = "0.5.23"
    """0.5.10 to 0.5.23; up to 0.5.20 without update sessions."""
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Tensor parallel ranks of each."""
    memory_saver: bool | None = None
    """Left out: as the policy needs it."""
    weights_cpu_backup: bool = False
    """Whether weights that are released are kept on the host."""
    cuda_graph_in_saver: bool = False
    """Whether CUDA graphs are really released, and not on the list only."""
    reads_back: bool = True
    """Whether the model's code can read tensors back."""
    kv_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 << 20
    """On each rank's GPU."""
    timings: Literal["fast", "measured"] = "fast"
    """`fast`: calls take no time; `measured`: what they took on an H200."""
    warm_up: bool = False
    """Whether a start ends with a request of its own, until which health says no."""
    launch_options: dict[str, object] = {}
    """Further fields of /server_info."""
    gpus: dict[str, tuple[str, ...]] = {}
    """The GPU of each rank, by server; left out: one of its own each, that nobody measures."""
    gpu_bytes: dict[str, Annotated[int, msgspec.Meta(ge=1)]] = {}
    """What a GPU has; left out: no limit."""
    measured: bool = True
    """Whether the controller can measure the GPUs that are named."""


class Play(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is done, and what must come of it."""

    steps: tuple[AnyStep, ...]
    """In turn."""
    faults: dict[str, tuple[str, ...]] = {}
    """By server, as `refitfsm.sim.faults` writes them; a command may stand in the path's place."""
    never: tuple[str, ...] = ()
    """What must not be seen: a law or a sight, or `NAME: TEXT` with whole words that stand in it."""
    sometimes: tuple[str, ...] = ()
    """What must be seen, written likewise."""
    unavoidable: tuple[str, ...] = ()
    """fleet: laws that no controller could keep here, such as when something delivers its call twice."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file."""

    name: str
    """What it is about, in a line."""
    ids: tuple[str, ...]
    """Of the report, the case or the defect: F09, A2, B1."""
    sources: tuple[str, ...] = ()
    """Where it was reported, as URLs."""
    shows: str
    """What it is about, in a sentence or two."""
    policy: str = "colocated"
    """A shipped policy's name, or a path as seen from the file."""
    policy_with: dict[str, object] = {}
    """Keys of the policy that are other here."""
    open: str = ""
    """Why refitfsm does not pass it yet; empty where it does."""
    servers: Servers = Servers()
    """How they are started; both plays have such servers of their own."""
    by_hand: Play | None = None
    """A client without refitfsm."""
    fleet: Play | None = None
    """The same intention through refitfsm."""


def load(path: str | Path) -> Scenario:
    """A scenario from its file.

    Raises:
        ConfigError: it cannot be read, a key is unknown, or a value is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"scenario {path}: cannot be read: {error}") from error
    scenario = loads(text, str(path))
    if scenario.policy.endswith(".toml"):
        return msgspec.structs.replace(scenario, policy=str(path.parent / scenario.policy))
    return scenario


def loads(text: str, where: str = "given") -> Scenario:
    """A scenario from its text. Errors are those of `load`."""
    try:
        scenario = msgspec.convert(tomllib.loads(text), Scenario)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"scenario {where}: cannot be read: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"scenario {where}: {error}; simulations/README.md has the keys") from None
    wrong = _wrong(scenario)
    if wrong:
        raise ConfigError(f"scenario {where}: {wrong}")
    return scenario


def files(path: str | Path) -> tuple[Path, ...]:
    """A scenario's file itself, or those of a folder, by name.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path)
    found = tuple(sorted(path.glob("*.toml"))) if path.is_dir() else (path,)
    if not found or not all(each.is_file() for each in found):
        raise ConfigError(f"scenario {path}: there is none; give a TOML file, or a folder of such")
    return found


def fault_of(words: str) -> Fault:
    """A fault in the words of a scenario: a command may stand for its path.

    Raises:
        ValueError: they are not such.
    """
    kind, at, call = words.partition("@")
    command, colon, nth = call.partition(":")
    return parse_fault(f"{kind}{at}{PATHS.get(command, command)}{colon}{nth}")


def _wrong(scenario: Scenario) -> str:
    """What the types do not say, in a sentence; empty if all is well."""
    plays = [play for play in (scenario.by_hand, scenario.fleet) if play is not None]
    if not plays:
        return "nothing is played; give [fleet], [by_hand] or both"
    if scenario.open and scenario.fleet is None:
        return "open says that refitfsm does not pass, and there is no [fleet]"
    names = {f"s{number}" for number in range(scenario.servers.count)}
    try:
        for play in plays:
            for written in (*play.never, *play.sometimes):
                Wanted.of(written)
            given = [words for each in play.faults.values() for words in each]
            for words in (*given, *(step.fault for step in flat(play.steps) if isinstance(step, Arm))):
                fault_of(words)
            _check_names(play, names)
            _check_gpus(play, scenario.servers)
    except ValueError as error:
        return str(error)
    return _misplaced(scenario)


def _misplaced(scenario: Scenario) -> str:
    by_hand, fleet = scenario.by_hand, scenario.fleet
    if by_hand is not None and any(isinstance(step, FleetStep) for step in flat(by_hand.steps)):
        return "a step of [by_hand] asks a fleet; a client without refitfsm has none"
    if fleet is not None and not any(isinstance(step, Connect) for step in flat(fleet.steps)):
        return 'no step of [fleet] makes one; begin with { do = "connect" }'
    odd = [law for law in (fleet.unavoidable if fleet else ()) if law not in LAWS]
    if odd:
        return f"{odd[0]!r} is no law; laws are {', '.join(LAWS)}"
    for name, play in (("by_hand", by_hand), ("fleet", fleet)):
        if play is not None and not play.never and not play.sometimes:
            return f"[{name}] claims nothing; say what must never or must sometimes be seen"
    return ""


def _check_names(play: Play, names: set[str]) -> None:
    """Raises ValueError where a server is named that is not there."""
    steps = tuple(flat(play.steps))
    named = [step.server for step in steps if isinstance(step, Raw | OfServer)]
    named += [name for step in steps if isinstance(step, Connect) for name in step.servers]
    for name in (*named, *play.faults):
        if name not in names:
            raise ValueError(f"there is no server {name!r}; there are {', '.join(sorted(names))}")


def _check_gpus(play: Play, servers: Servers) -> None:
    """Raises ValueError where a GPU is named that no server stands on."""
    there = {gpu for ranks in servers.gpus.values() for gpu in ranks}
    for step in flat(play.steps):
        if isinstance(step, Take | GiveBack) and step.gpu not in there:
            raise ValueError(f"there is no GPU {step.gpu!r}; there are {', '.join(sorted(there)) or 'none'}")
