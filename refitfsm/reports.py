"""What a fleet tells its owner: how a cycle went, and what is believed now."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from refitfsm.controller import Timing
from refitfsm.errors import CycleAborted
from refitfsm.model.fleet import Cycle, FleetView, Goal, Phase, admits, usable
from refitfsm.model.states import Condition
from refitfsm.model.values import ServerView


class CycleReport(NamedTuple):
    """How a cycle went."""

    cycle: int
    """0: nothing was to be done."""
    goal: Goal
    """What it was to reach."""
    version: int
    """The version that the fleet serves now."""
    seconds: float
    """From the request to the close."""
    phases_s: Mapping[str, float]
    """For each kind of command, what the slowest server spent on it."""
    failed: tuple[tuple[str, str], ...]
    """Servers that dropped out while the others went on, with the reason."""


class FleetStatus(NamedTuple):
    """What is believed of the fleet now."""

    run_id: str
    """Names this run in version labels and in the audit."""
    policy: str
    """The policy's name."""
    serving_version: int
    """The version that the fleet serves."""
    cycle: Cycle | None
    """The open cycle, or None."""
    servers: tuple[ServerView, ...]
    """What is believed of each server, by name."""
    in_flight: Mapping[str, int]
    """Requests in flight, by server."""


def phases_s(timings: Iterable[Timing]) -> dict[str, float]:
    """For each kind of command, the seconds that the slowest server spent on it."""
    phases: dict[str, dict[str, float]] = {}
    for timing in timings:
        spent = phases.setdefault(timing.kind.value, {})
        spent[timing.server] = spent.get(timing.server, 0.0) + timing.seconds
    return {kind: max(spent.values()) for kind, spent in phases.items()}


def joined(staged: CycleReport, committed: CycleReport) -> CycleReport:
    """The report of a refit that was a stage and a commit."""
    kinds = {**staged.phases_s, **committed.phases_s}
    return committed._replace(
        seconds=staged.seconds + committed.seconds,
        phases_s={kind: staged.phases_s.get(kind, 0.0) + committed.phases_s.get(kind, 0.0) for kind in kinds},
        failed=(*staged.failed, *committed.failed),
    )


def aborted(cycle: Cycle, fleet: FleetView) -> CycleAborted:
    """The error for a cycle that did not reach its goal: who failed, why, and what is left."""
    views = fleet.servers
    lost = tuple(name for name, view in views.items() if not usable(view))
    mixed = tuple(name for name, view in views.items() if view.condition is Condition.QUARANTINED)
    why = "; ".join(f"{server}: {reason}" for server, reason in cycle.failed) or cycle.reason
    done = "committed on no server" if cycle.phase is Phase.COMMITTED else "aborted"
    count = sum(map(admits, views.values()))
    waiting = [name for name, view in views.items() if not admits(view) and name not in (*lost, *mixed)]
    remedy = f"; restart {', '.join(lost)}" if lost else ""
    remedy += f"; refit again, or restart {', '.join(mixed)}" if mixed else ""
    remedy += f"; paused until a refit or a resume: {', '.join(waiting)}" if waiting else ""
    return CycleAborted(
        f"cycle {cycle.id} ({cycle.goal} of version {cycle.version}) {done}: {why}; {count} of {len(views)}"
        f" servers serve version {fleet.serving_version}{remedy}",
        cycle.failed,
        (*lost, *mixed),
    )
