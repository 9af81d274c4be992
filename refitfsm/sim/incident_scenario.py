"""A run's incident as a scenario: the same requests, and faults that end commands as they ended."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from refitfsm import policies
from refitfsm.audit.journal import Journal, MemoryJournal
from refitfsm.controller import Controller
from refitfsm.errors import ConfigError
from refitfsm.model.fleet import Goal
from refitfsm.model.rules import Rules
from refitfsm.model.values import Command, CommandKind, EventName
from refitfsm.sim.incident import Call, Ending, Incident, Trouble, read_incident
from refitfsm.sim.profiles import profile_for
from refitfsm.sim.scenario import Scenario, loads
from refitfsm.sim.scenario_play import Played, play
from refitfsm.sim.scenario_sights import SIGHTS, Wanted
from refitfsm.sim.tiny import TinyWeights
from refitfsm.weights.plan import PushWish

SERVERS_MAX = 64
"""What a scenario may have."""
_LATE_S = 2.0
"""How late an answer comes of what was in flight when the caller left."""


class Reproduced(NamedTuple):
    """A run as a scenario, and how that goes."""

    text: str
    """The file."""
    recorded: tuple[tuple[Goal, Ending], ...]
    """How each call ended."""
    played: tuple[tuple[Goal, Ending], ...]
    """How each ends in the scenario."""
    left_out: tuple[str, ...]
    """What the file does not claim, because it did not come about again: faults and sights."""
    wrong: tuple[str, ...]
    """What is not as it has to be when the file is played."""

    @property
    def same(self) -> int:
        """How many calls, from the first on, end as they did."""
        pairs = enumerate(zip(self.recorded, self.played, strict=False))
        shorter = min(len(self.recorded), len(self.played))
        return next((at for at, (old, new) in pairs if old != new), shorter)

    @property
    def good(self) -> bool:
        """Whether the scenario ends as the run did, in every call."""
        return not self.wrong and self.same == len(self.recorded) == len(self.played)


def reproduce(incident: Incident) -> Reproduced:
    """Make a scenario of a run's incident, play it, and compare.

    Raises:
        ConfigError: the run has more servers than a scenario may have.
    """
    draft = _Writer(incident, frozenset())
    first, _ = _played(loads(draft.text(), "made of an audit"))
    idle = frozenset(draft.claims() - _came_about(draft, first))
    text = _Writer(incident, idle).text() if idle else draft.text()
    played, again = _played(loads(text, "made of an audit"))
    names = _names(incident)
    recorded = tuple(
        (call.goal, call.ending._replace(failed=frozenset(names[name] for name in call.ending.failed)))
        for call in incident.calls
    )
    ends = tuple((call.goal, call.ending) for call in again)
    return Reproduced(text, recorded, ends, tuple(sorted(idle)), played.wrong)


def _played(scenario: Scenario) -> tuple[Played, tuple[Call, ...]]:
    """How it goes, and what its own journal says."""
    journals: list[Journal] = []

    def controls(*given: Any, **further: Any) -> Controller:
        journals.append(given[3])
        return Controller(*given, **further)

    assert scenario.fleet is not None  # noqa: S101 - for the type checker: it was made with one
    played = play(scenario, scenario.fleet, controls)
    if not journals or not isinstance(journals[0], MemoryJournal):
        return played, ()
    return played, read_incident(journals[0].lines, "played").calls


def _came_about(draft: "_Writer", played: Played) -> set[str]:
    """Faults that struck and sights that were seen."""
    struck = [sight.words for sight in played.seen if sight.name == "fault_strikes"]

    def is_so(claim: str) -> bool:
        if claim.partition(":")[0] in SIGHTS:
            return Wanted.of(claim).first(played.seen) is not None
        return any(words.startswith(f"{claim} ") for words in struck)

    return set(filter(is_so, draft.claims()))


def _names(incident: Incident) -> dict[str, str]:
    return {name: f"s{number}" for number, name in enumerate(sorted(incident.head.servers))}


class _Writer:
    """Writes the file. `without` are claims that are left out: see `claims`."""

    def __init__(self, incident: Incident, without: frozenset[str]) -> None:
        if len(incident.head.servers) > SERVERS_MAX:
            raise ConfigError(
                f"the run has {len(incident.head.servers)} servers, and a scenario at most {SERVERS_MAX}"
            )
        self._incident = incident
        self._without = without
        self._names = _names(incident)
        versions = sorted({call.version for call in incident.calls} | {0, incident.version})
        self._versions = {version: rank for rank, version in enumerate(versions)}
        """A run's versions may be any numbers; which is newer is what matters."""
        self._chunks = len(TinyWeights(1).plan(PushWish()).chunks)

    def text(self) -> str:
        """The file."""
        incident = self._incident
        run = incident.head.run
        left_out = f" {incident.beside} requests beside others are left out." if incident.beside else ""
        lines = [
            f"name = {_toml(f'run {run} of {incident.head.started}')}",
            f"ids = {_toml([f'RUN-{run}'])}",
            f"shows = {_toml(f'What the audit of a run says of it, call by call.{left_out}')}",
            *_policy_lines(incident.head.rules),
            "",
            "[servers]",
            *(f"{key} = {_toml(value)}" for key, value in self._servers().items()),
            "",
            "[fleet]",
            "steps = [",
            *(f"    {_toml(step)}," for step in self._steps()),
            "]",
            'never = ["something_never_ends"]',
            f"sometimes = {_toml(self._sometimes())}",
        ]
        return "\n".join(lines) + "\n"

    def claims(self) -> set[str]:
        """What is said to happen: `SERVER FAULT` for each fault, and what is to be seen."""
        armed = {f"{step['server']} {step['fault']}" for step in self._steps() if step["do"] == "arm"}
        return armed | set(self._sometimes())

    def _servers(self) -> dict[str, object]:
        found = self._incident.capabilities
        version = found.sglang_version
        try:
            profile_for(version)
        except ValueError:
            version = "0.5.23" if found.sessions else "0.5.16"
        return {
            "count": len(self._names),
            "sglang_version": version,
            "tp_size": found.tp_size,
            "memory_saver": found.memory_saver,
            "weights_cpu_backup": found.weights_backup,
        }

    def _steps(self) -> Iterator[dict[str, object]]:
        for call in self._incident.calls:
            yield from self._killed(call.dead_before)
            for trouble in call.troubles:
                yield from self._armed(trouble.server, self._fault(trouble))
            yield from self._asked(call)
        yield from self._killed(list(self._incident.dead_after))

    def _killed(self, servers: list[str]) -> Iterator[dict[str, object]]:
        """Servers that died while nothing was sent to them; a request finds that out."""
        for server in servers:
            yield {"do": "kill", "server": self._names[server]}
        if servers:
            yield {"do": "generate", "times": len(self._names), "may_fail": True}

    def _asked(self, call: Call) -> Iterator[dict[str, object]]:
        step: dict[str, object] = {"do": "connect" if call.goal is Goal.ENROL else call.goal.value}
        if call.goal in (Goal.REFIT, Goal.STAGE, Goal.COMMIT):
            step["version"] = self._versions[call.version]
        if call.given_up_at is not None:
            yield from self._late(call)
            yield {**step, "after_s": 0.0, "may_fail": True}
            yield {"do": "wait", "seconds": _LATE_S / 2}
            yield {"do": "cancel"}
        elif call.ending.how in ("reached", "met already"):
            yield step
        elif call.ending.how == "open":
            yield {**step, "may_fail": True}
        elif call.goal is Goal.ENROL:
            yield {**step, "fails": "ConfigError"}
        else:
            yield {**step, "fails": "CycleAborted" if call.ending.how == "aborted" else "CommandRefused"}

    def _late(self, call: Call) -> Iterator[dict[str, object]]:
        """Hold up what was in flight when the caller left, so that he leaves there again."""
        held = {(each.server, each.command.kind, each.number) for each in call.troubles}
        for server, command, number in call.given_up_at or ():
            if (server, command.kind, number) not in held and command.kind is not CommandKind.DRAIN:
                yield from self._armed(server, f"delay={_LATE_S:g}@{self._at(command, number)}")

    def _armed(self, server: str, fault: str) -> Iterator[dict[str, object]]:
        name = self._names[server]
        if fault and f"{name} {fault}" not in self._without:
            yield {"do": "arm", "server": name, "fault": fault}

    def _fault(self, trouble: Trouble) -> str:
        """The fault that ends a command like that; empty for a drain, which is no call."""
        if trouble.command.kind is CommandKind.DRAIN:
            return ""
        kind = {
            EventName.DIED: "kill",
            EventName.REFUSED: "status-before=409",
            EventName.FAILED: "success-false=200",
            EventName.LOST: "hang-before" if trouble.by_deadline else "lose-answer",
        }[trouble.ended]
        return f"{kind}@{self._at(trouble.command, trouble.number)}"

    def _at(self, command: Command, number: int) -> str:
        """Which call that is: models of other sizes are pushed in other numbers of chunks."""
        if command.kind is CommandKind.VERIFY:
            return f"/model_info:{number}"
        if command.kind is CommandKind.PUSH:
            last = command.chunk + 1 == command.chunks
            number = self._chunks if last else min(command.chunk + 1, max(1, self._chunks - 1))
        return f"{command.kind.value}:{number}"

    def _sometimes(self) -> list[str]:
        calls = self._incident.calls
        seen = [f"serving_at_the_end: {self._incident.serving} of {len(self._names)}"]
        if self._incident.version:
            seen.append(f"version_is_served: version {self._versions[self._incident.version]}")
        if any(call.ending.how == "aborted" and call.given_up_at is None for call in calls):
            seen.append("cycle_aborts")
        dropped = {name for call in calls if call.ending.how == "reached" for name in call.ending.failed}
        seen += [f"server_drops_out: {self._names[name]}" for name in sorted(dropped)]
        return [claim for claim in seen if claim not in self._without]


def _policy_lines(rules: Rules) -> Iterator[str]:
    """The shipped policy of that name, or one like it, and what is other."""
    like = "colocated" if rules.release_tags else "always_on"
    base = policies.load(rules.name if rules.name in policies.shipped() else like)
    deadlines_s = {kind.value: seconds for kind, seconds in rules.deadlines_s}
    given: dict[str, object] = {
        "release": sorted(tag.value for tag in rules.release_tags),
        "on_failure": rules.on_failure.value,
        "floor": rules.floor,
        "verify": rules.verify.value,
        "attempts": rules.attempts,
        "push_bytes_per_s": rules.push_bytes_per_s,
        "cycle_s": rules.cycle_s,
        "grace_s": rules.grace_s,
        "deadlines_s": deadlines_s,
    }
    budget_s = base.policy.drain_budget_s
    if deadlines_s["drain"] <= budget_s:
        given["drain_budget_s"] = deadlines_s["drain"] / 2
    shipped = msgspec.to_builtins(base.policy)
    shipped["release"] = sorted(shipped["release"])
    other = {key: value for key, value in given.items() if shipped.get(key) != value}
    yield f"policy = {_toml(base.name)}"
    if other:
        yield f"policy_with = {_toml(other)}"


def _toml(value: object) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return json.dumps(value)
