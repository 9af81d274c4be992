"""Policies: how a fleet is refitted, as validated data.

A policy is a TOML file: one that is shipped, by its name, or anybody's, by its path. Unknown keys are
refused. See `policies/README.md` for what each key means.
"""

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from refitfsm.errors import ConfigError
from refitfsm.model.rules import FailurePolicy, Rules
from refitfsm.model.states import Tag
from refitfsm.model.values import CommandKind, VerifyLevel
from refitfsm.weights.plan import Strategy

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e7)]
"""Up to some four months: no deadline is endless."""
Count = Annotated[int, msgspec.Meta(ge=1)]


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a command counts as lost, in seconds, by kind."""

    enrol: Seconds = 120.0
    drain: Seconds = 60.0
    pause: Seconds = 60.0
    flush: Seconds = 60.0
    release: Seconds = 60.0
    resume: Seconds = 60.0
    begin: Seconds = 60.0
    push: Seconds = 60.0
    end: Seconds = 60.0
    verify: Seconds = 60.0
    continue_: Seconds = msgspec.field(default=30.0, name="continue")

    def of(self, kind: CommandKind) -> float:
        """The deadline of one kind of command, in seconds."""
        return float(getattr(self, "continue_" if kind is CommandKind.CONTINUE else kind.value))


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A policy file. Times in seconds, sizes in bytes."""

    description: str
    release: tuple[Tag, ...] = ()
    on_failure: FailurePolicy = FailurePolicy.ABORT
    floor: Count = 1
    verify: VerifyLevel = VerifyLevel.VERSION
    attempts: Count = 3
    share_gpus: bool = False
    push_strategy: Strategy = Strategy.AUTO
    chunk_bytes_max: Count = 1 << 30
    bucket_bytes: Count = 512 << 20
    buffers: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    push_bytes_per_s: Annotated[float, msgspec.Meta(ge=1, le=1e15)] = 1e8
    memory_margin_bytes: Annotated[int, msgspec.Meta(ge=0)] = 256 << 20
    drain_budget_s: Annotated[float, msgspec.Meta(ge=0, le=1e7)] = 10.0
    cycle_s: Seconds = 600.0
    grace_s: Seconds = 60.0
    deadlines_s: Deadlines = Deadlines()

    def rules(self, name: str) -> Rules:
        """The part of the policy that the planner decides by."""
        return Rules(
            name=name,
            release_tags=frozenset(self.release),
            on_failure=self.on_failure,
            floor=self.floor,
            verify=self.verify,
            attempts=self.attempts,
            needs_loader=self.push_strategy is Strategy.REGISTERED,
            deadlines_s=tuple((kind, self.deadlines_s.of(kind)) for kind in CommandKind),
            push_bytes_per_s=self.push_bytes_per_s,
            cycle_s=self.cycle_s,
            grace_s=self.grace_s,
        )


class NamedPolicy(msgspec.Struct, frozen=True):
    """A policy with the name it is shown under."""

    name: str
    policy: Policy

    @property
    def rules(self) -> Rules:
        return self.policy.rules(self.name)


def _folder() -> Path:
    """The shipped policies: inside the package in a wheel, beside it in a checkout."""
    installed = Path(str(resources.files("refitfsm"))) / "_policies"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "policies"


def shipped() -> tuple[str, ...]:
    """Names of the shipped policies."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


def load(name_or_path: str | Path) -> NamedPolicy:
    """A shipped policy by its name, or a policy file by its path.

    Raises:
        ConfigError: there is no such policy, it is no TOML, a key is unknown, or a value is wrong.
    """
    text = str(name_or_path)
    is_path = text.endswith(".toml") or "/" in text
    path = Path(text) if is_path else _folder() / f"{text}.toml"
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        names = ", ".join(shipped())
        raise ConfigError(f"policy {text}: there is none; use a path, or one of {names}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"policy {path}: cannot be read: {error}") from error
    return NamedPolicy(path.stem, _checked(path, raw))


def changed(named: NamedPolicy, keys: Mapping[str, object]) -> NamedPolicy:
    """A policy under the same name with some keys other than they are.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    raw = msgspec.to_builtins(named.policy)
    return NamedPolicy(named.name, _checked(named.name, {**raw, **keys})) if keys else named


def _checked(path: str | Path, raw: dict[str, object]) -> Policy:
    try:
        policy = msgspec.convert(raw, Policy)
    except msgspec.ValidationError as error:
        keys = ", ".join(Policy.__struct_encode_fields__)
        known = f"; keys are {keys}" if "field" in str(error) else ""
        raise ConfigError(f"policy {path}: {error}{known}") from None
    if policy.deadlines_s.drain <= policy.drain_budget_s:
        raise ConfigError(
            f"policy {path}: deadlines_s.drain ({policy.deadlines_s.drain:g}) must be above drain_budget_s"
            f" ({policy.drain_budget_s:g}), or every slow drain counts as lost"
        )
    if policy.cycle_s <= policy.drain_budget_s:
        raise ConfigError(
            f"policy {path}: cycle_s ({policy.cycle_s:g}) must be above drain_budget_s"
            f" ({policy.drain_budget_s:g}), or a slow drain ends every cycle"
        )
    if len(set(policy.release)) != len(policy.release):
        raise ConfigError(f"policy {path}: a tag is given twice in release; give each once")
    return policy
