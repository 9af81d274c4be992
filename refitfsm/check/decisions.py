"""Laws of single decisions: over what was believed, what was given, and what was decided.

The laws of states say what servers may be; these say what a planner may do, whatever its servers are.
"""

from collections.abc import Callable
from typing import NamedTuple

from refitfsm.check import steps
from refitfsm.check.changes import Endless
from refitfsm.model.fleet import Cycle, FleetView, Goal, Phase
from refitfsm.model.records import FleetRecord, Record, ServerRecord, Turn
from refitfsm.model.row import Verdict
from refitfsm.model.rules import FailurePolicy, Rules
from refitfsm.model.values import REQUESTS
from refitfsm.planner.cycle import Decide, Decision, Input, Tick


class Unlawful(Exception):
    """A decision breaks a law; the law, as a sentence."""


class Case(NamedTuple):
    """One decision, and what led to it."""

    before: FleetView
    given: Input
    now_s: float
    rules: Rules
    decided: Decision


class Law(NamedTuple):
    """A law over one decision."""

    name: str
    holds: Callable[[Case], bool]
    says: str


def _is_written(case: Case) -> bool:
    taken = [
        (record.server, record.after.pending.command, record.after.seq)
        for record in case.decided.records
        if isinstance(record, ServerRecord)
        and record.verdict is Verdict.TAKE
        and record.after.pending is not None
        and record.after.seq == record.before.seq + 1
    ]
    return taken == [(each.server, each.command, each.seq) for each in case.decided.commands]


def _is_in_flight(case: Case) -> bool:
    for each in case.decided.commands:
        pending = case.decided.fleet.servers[each.server].pending
        if pending is None or (pending.command, pending.seq) != (each.command, each.seq):
            return False
    return True


def _is_numbered(case: Case) -> bool:
    sent = [each.server for each in case.decided.commands]
    return all(
        case.decided.fleet.servers[name].seq == view.seq + sent.count(name)
        for name, view in case.before.servers.items()
    )


def _has_a_deadline(case: Case) -> bool:
    cycle = case.decided.fleet.cycle
    return all(
        case.now_s < each.deadline_s and (cycle is None or each.deadline_s <= cycle.closes_s)
        for each in case.decided.commands
    )


def _ends_in_time(case: Case) -> bool:
    cycle = case.before.cycle
    if not isinstance(case.given, Tick) or cycle is None or case.now_s < cycle.closes_s:
        return True
    after = case.decided.fleet.cycle
    late = [
        view.server
        for view in case.decided.fleet.servers.values()
        if view.pending is not None and view.pending.deadline_s <= case.now_s
    ]
    return not late and (after is None or after.closes_s > case.now_s)


def _commits(case: Case) -> tuple[Cycle, ...]:
    return tuple(
        record.cycle
        for record in case.decided.records
        if isinstance(record, FleetRecord) and record.turn is Turn.COMMITTED and record.cycle is not None
    )


def _version_is_of_a_commit(case: Case) -> bool:
    before, after = case.before.serving_version, case.decided.fleet.serving_version
    commits = _commits(case)
    return after == (commits[-1].version if commits else before) and after >= before


def _commit_counts_enough(case: Case) -> bool:
    for cycle in _commits(case):
        if cycle.goal is Goal.ENROL:
            continue
        left = len(cycle.members - cycle.failed_servers)
        spares = case.rules.on_failure is FailurePolicy.QUARANTINE
        needed = max(1, case.rules.floor) if spares else len(cycle.members)
        if left < needed:
            return False
    return True


def _members_stay(case: Case) -> bool:
    before, after = case.before.cycle, case.decided.fleet.cycle
    same = before is not None and after is not None and before.id == after.id
    if not same or before is None or after is None:
        return True
    return before.members == after.members and before.failed_servers <= after.failed_servers


def _is_counted(case: Case) -> bool:
    cycle, servers = case.decided.fleet.cycle, case.decided.fleet.servers
    return cycle is None or cycle.busy == sum(servers[name].pending is not None for name in cycle.members)


def _cycle_waits_for_somebody(case: Case) -> bool:
    cycle = case.decided.fleet.cycle
    return cycle is None or cycle.busy > 0


def _an_abort_is_final(case: Case) -> bool:
    before, after = case.before.cycle, case.decided.fleet.cycle
    if before is None or before.phase is not Phase.ABORTING:
        return True
    return (after is None or after.id != before.id or after.phase is Phase.ABORTING) and not _commits(case)


LAWS: tuple[Law, ...] = (
    Law("what_is_sent_is_written_first", _is_written, "Each command is in the records that it comes with."),
    Law("what_is_sent_is_in_flight", _is_in_flight, "A command that is sent is what its server is at."),
    Law("numbers_are_given_once", _is_numbered, "A server's number rises by one with each command."),
    Law("every_command_has_a_deadline", _has_a_deadline, "It lies ahead, and not beyond the cycle's end."),
    Law("a_cycle_ends_in_time", _ends_in_time, "When its time is up a cycle ends, and what is late is lost."),
    Law(
        "the_version_moves_at_a_commit",
        _version_is_of_a_commit,
        "The version that is served is that of the last commit, and never falls.",
    ),
    Law(
        "a_commit_counts_enough", _commit_counts_enough, "All commit, or the policy's floor where it spares."
    ),
    Law("members_stay", _members_stay, "A cycle keeps its members, and who dropped out stays out."),
    Law("who_is_busy_is_counted", _is_counted, "A cycle knows how many of its members have work in flight."),
    Law(
        "a_cycle_waits_for_somebody", _cycle_waits_for_somebody, "A cycle is open while something is awaited."
    ),
    Law("an_abort_is_final", _an_abort_is_final, "A cycle that aborts does not commit."),
)


def unlawful(case: Case) -> str:
    """The first law that a decision breaks, as a sentence; empty if none."""
    for law in LAWS:
        if not law.holds(case):
            return f"{law.name}: {law.says}"
    return ""


def _step(record: Record) -> str:
    """The law of steps that a record breaks; empty if none. What the planner may not ask is judged apart."""
    if not isinstance(record, ServerRecord):
        return ""
    before, event = record.before, record.event
    if record.verdict is Verdict.TAKE:
        return steps.unlawful(steps.Step(before, event, record.facts, record.after))
    return "" if event.name in REQUESTS else steps.unheard(before, event, record.verdict, "", "")


def unlawful_step(case: Case) -> str:
    """The first law of steps that a decision breaks, as a sentence; empty if none."""
    return next(filter(None, map(_step, case.decided.records)), "")


def watched(decides: Decide, *, steps_too: bool = False) -> Decide:
    """The same planner, each decision judged.

    Args:
        steps_too: and each step of a server in it. Planners that are wrong are not: the laws of what they do
            have to find them, not those of how the table is written.

    Raises, instead of deciding:
        Unlawful: a law does not hold; or the planner comes to no end, or to no decision.
    """

    def other(fleet: FleetView, given: Input, now_s: float, rules: Rules) -> Decision:
        try:
            decided = decides(fleet, given, now_s, rules)
        except Endless as error:
            raise Unlawful(f"a_decision_ends: {error}") from error
        except (LookupError, AssertionError, TypeError) as error:
            raise Unlawful(f"every_input_has_a_decision: {error!r}") from error
        case = Case(fleet, given, now_s, rules, decided)
        why = unlawful(case) or (unlawful_step(case) if steps_too else "")
        if why:
            raise Unlawful(why)
        return decided

    return other
