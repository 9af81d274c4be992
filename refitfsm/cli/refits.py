"""What `refitfsm run` does, and how it ended: the cycles on real servers, the servers' last states."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from refitfsm.cli.ask import ask_each
from refitfsm.cli.show import (
    EXIT_ABORTED,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_OK,
    EXIT_USAGE,
    Json,
    Screen,
    merged,
    phase_line,
    report_json,
    servers_json,
    short_name,
    token_line,
)
from refitfsm.errors import CommandRefused, ConfigError, CycleAborted, RefitError
from refitfsm.fleet import Fleet
from refitfsm.generation import Generation
from refitfsm.model.fleet import Goal, admits
from refitfsm.model.states import ServerState
from refitfsm.model.values import CommandKind, ServerView
from refitfsm.reports import CycleReport, FleetStatus
from refitfsm.servers import ServerSpec
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest
from refitfsm.weights.safetensors import CheckpointFolder

PATIENCE_S = 2.0
"""After this long a person is told what is waited for."""


class Target(NamedTuple):
    """Which fleet."""

    servers: tuple[ServerSpec, ...]
    policy: str
    audit: Path | None
    api_key: str | None
    admin_api_key: str | None

    def connect(self) -> Fleet:
        return Fleet.connect(
            self.servers,
            policy=self.policy,
            journal=self.audit,
            api_key=self.api_key,
            admin_api_key=self.admin_api_key,
        )


class Order(NamedTuple):
    """What to do with it."""

    weights: tuple[Path, ...]
    """For version 1, 2 and so on."""
    prompt: tuple[int, ...]
    """Asked of every server after a refit; empty: nothing is asked."""


class Done(NamedTuple):
    """One committed cycle."""

    version: int
    weights: Path
    reports: tuple[CycleReport, ...]
    answers: dict[str, Generation]

    @property
    def seconds(self) -> float:
        return sum(report.seconds for report in self.reports)

    def as_json(self) -> dict[str, Json]:
        return {
            "version": self.version,
            "weights": str(self.weights),
            "seconds": round(self.seconds, 6),
            "cycles": [{"goal": report.goal.value, **report_json(report)} for report in self.reports],
            "tokens": {server: list(answer.output_ids) for server, answer in self.answers.items()},
        }


_NAMES = {
    EXIT_OK: "committed",
    EXIT_USAGE: "refused",
    EXIT_ABORTED: "aborted",
    EXIT_LOST: "lost",
    EXIT_INTERRUPTED: "interrupted",
}


@dataclass
class Outcome:
    """How it ended."""

    audit: Path | None
    done: list[Done] = field(default_factory=list)
    status: FleetStatus | None = None
    error: str = ""
    lost: tuple[str, ...] = ()
    """Servers that the error names already."""
    interrupted: bool = False
    code: int = EXIT_OK

    def as_json(self) -> dict[str, Json]:
        return {
            "outcome": _NAMES[self.code],
            "serving_version": self.status.serving_version if self.status else 0,
            "refits": [done.as_json() for done in self.done],
            "servers": servers_json(self.status) if self.status else [],
            "audit": str(self.audit) if self.audit else None,
            "error": self.error or None,
        }


async def carry_out(target: Target, order: Order, screen: Screen) -> Outcome:
    """Connect, refit in turn, let go.

    Raises:
        ConfigError, AuditError: something given is wrong; no server was changed.
    """
    manifests = _read_manifests(order.weights)
    fleet = target.connect()
    outcome = Outcome(target.audit)
    loop = asyncio.get_running_loop()
    notice = loop.call_later(PATIENCE_S, screen.line, "waiting for the servers to be ready ...")
    try:
        with _interruptible(fleet, outcome):
            async with fleet:
                notice.cancel()
                try:
                    await _refits(fleet, manifests, order, screen, outcome)
                finally:
                    if not outcome.interrupted:
                        outcome.status = fleet.status()
    except RefitError as error:
        if outcome.interrupted:
            outcome.code, outcome.error = EXIT_INTERRUPTED, _interrupted(outcome.status)
        elif outcome.status is None:
            raise
        else:
            _failed(outcome, error)
    finally:
        notice.cancel()
    if outcome.status is not None:
        _judge(outcome, outcome.status)
    return outcome


@contextmanager
def _interruptible(fleet: Fleet, outcome: Outcome) -> Iterator[None]:
    """Ctrl-C and SIGTERM let go of the servers at once, as they are: a command in flight may hang."""
    loop = asyncio.get_running_loop()
    closing: list[asyncio.Task[None]] = []

    def interrupt() -> None:
        if outcome.interrupted:
            return
        outcome.interrupted = True
        status = fleet.status()
        connecting = status.cycle is not None and status.cycle.goal is Goal.ENROL
        outcome.status = None if connecting else status
        closing.append(loop.create_task(fleet.shutdown()))

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _refits(
    fleet: Fleet, manifests: dict[Path, Manifest], order: Order, screen: Screen, outcome: Outcome
) -> None:
    status = fleet.status()
    _check_model(manifests, status, screen)
    screen.line(_connected(status))
    for version in range(1, len(order.weights) + 1):
        await _one_cycle(fleet, version, order, screen, outcome)


def _failed(outcome: Outcome, error: RefitError) -> None:
    """Something that was given is wrong, or a cycle aborted. What the servers serve is judged after this."""
    outcome.error = str(error)
    given = isinstance(error, ConfigError | CommandRefused) and not outcome.done
    outcome.code = EXIT_USAGE if given else EXIT_ABORTED
    if isinstance(error, CycleAborted) and error.lost:
        outcome.code, outcome.lost = EXIT_LOST, error.lost


def _read_manifests(folders: Sequence[Path]) -> dict[Path, Manifest]:
    """Every folder opened once, so that a bad one is known before any server is touched."""
    manifests: dict[Path, Manifest] = {}
    try:
        with ExitStack() as stack:
            for folder in dict.fromkeys(folders):
                manifests[folder] = stack.enter_context(CheckpointFolder.open(folder)).manifest
    except WeightsError as error:
        raise ConfigError(f"weights: {error}") from None
    return manifests


def _check_model(manifests: dict[Path, Manifest], status: FleetStatus, screen: Screen) -> None:
    """Before the release, not after it: a fleet whose memory is out cannot do without the weights.

    Compared with the checkpoint that the servers were started from, where it can be read from here, else
    with the first folder.
    """
    expected = next(iter(manifests.values()))
    path = Path(status.servers[0].capabilities.model_path)
    whose = "the first folder's"
    if path.is_dir():
        try:
            with CheckpointFolder.open(path) as checkpoint:
                expected, whose = checkpoint.manifest, f"the servers' ({path})"
        except WeightsError:
            pass  # no safetensors there: nothing to compare with
    if whose == "the first folder's":
        screen.line(
            f"warning: {path} cannot be read from here, so the weights are not compared with the model"
        )
    for folder, manifest in manifests.items():
        for difference in manifest.differences(expected):
            raise ConfigError(
                f"weights {folder}: the model is not {whose}: {difference} Give a checkpoint of the"
                " model that the servers were started from; no weights were sent."
            )


async def _one_cycle(fleet: Fleet, version: int, order: Order, screen: Screen, outcome: Outcome) -> None:
    folder = order.weights[version - 1]
    released = await fleet.release()
    refitted = await fleet.refit(folder, version)
    reports = tuple(report for report in (released, refitted) if report.cycle)
    done = Done(version, folder, reports, {})
    outcome.done.append(done)
    serving = sum(map(admits, fleet.status().servers))
    screen.line(
        f"refit {version}/{len(order.weights)}: {serving} of {len(fleet.status().servers)} servers serve"
        f" version {version} ({folder}) after {done.seconds:.3f} s: {phase_line(merged(reports))}"
    )
    if order.prompt:
        done.answers.update(await ask_each(fleet, order.prompt))
        for server, answer in done.answers.items():
            screen.line(f"  {short_name(server)}: {token_line(answer.output_ids, len(answer.output_ids))}")


def _connected(status: FleetStatus) -> str:
    versions = ", ".join(sorted({view.capabilities.sglang_version for view in status.servers}))
    count = len(status.servers)
    which = f"{count} server{'' if count == 1 else 's'} (SGLang {versions})"
    return f"{which}, policy {status.policy}, run {status.run_id}"


def _judge(outcome: Outcome, status: FleetStatus) -> None:
    """Read the end off the servers: one that does not serve has to be restarted, whatever the reason."""
    idle = [view for view in status.servers if not admits(view)]
    if outcome.code == EXIT_INTERRUPTED or not idle:
        return
    outcome.code = EXIT_LOST
    left = [f"{view.server} is {_left(view)}" for view in idle if view.server not in outcome.lost]
    outcome.error = "; ".join([outcome.error or "not all servers serve", *left])


def _interrupted(status: FleetStatus | None) -> str:
    """In which state the servers are left, in one line."""
    if status is None:
        return "interrupted while connecting: no server was asked to do anything"
    cycle = status.cycle
    when = f" in cycle {cycle.id} ({cycle.goal} of version {cycle.version})" if cycle else ""
    left = "; ".join(
        f"{view.server} serves version {status.serving_version}"
        if _serves(view)
        else f"{view.server} is {_left(view)}"
        for view in status.servers
    )
    return f"interrupted{when}: {left}"


def _serves(view: ServerView) -> bool:
    """A server that is only drained is still untouched: the gate was ours alone."""
    idle = view.pending is None or view.pending.command.kind is CommandKind.DRAIN
    return view.state is ServerState.SERVING and not view.paused and idle


def _left(view: ServerView) -> str:
    """What to know of a server that does not serve."""
    if view.state is ServerState.OFFLINE:
        return f"offline ({view.reason}): start it again"
    facts: list[str] = [view.state.value]
    if view.condition.value != "healthy":
        facts.append(view.condition.value)
    if view.paused:
        facts.append("paused")
    if view.released:
        facts.append("without " + " and ".join(tag.value for tag in sorted(view.released)))
    if view.pending is not None:
        facts.append(f"with a {view.pending.command.kind.value} in flight")
    return f"{', '.join(facts)}: restart it"
