"""The fleet's plan: pure and total. A fleet, an input and the time in; a decision out.

    decide(fleet, Request | ServerEvent | Tick, now_s, rules) -> Decision

Servers advance on their own through the program of the cycle's goal; they meet at the commit, which
is the only place where the version that the fleet serves moves.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from refitfsm.model.fitness import differing_checksums, unfit
from refitfsm.model.fleet import (
    OF_A_VERSION,
    WITHOUT_COMMIT,
    Cycle,
    FleetView,
    Goal,
    Phase,
    holds_staged,
    usable,
)
from refitfsm.model.records import FleetRecord, Issued, Record, ServerRecord, Turn
from refitfsm.model.rules import FailurePolicy, Rules
from refitfsm.model.states import Condition
from refitfsm.model.table import Verdict
from refitfsm.model.values import Event, EventName, ServerView
from refitfsm.planner.judge import apply, judge
from refitfsm.planner.playbook import PLAYBOOK, Playbook
from refitfsm.planner.program import Step, can_go_back, next_step
from refitfsm.planner.requests import Refusal, Request, is_met, refusal


class ServerEvent(NamedTuple):
    """Something happened to a server."""

    server: str
    event: Event


class Tick(NamedTuple):
    """Time has passed; the time itself comes with every input."""


class Abandon(NamedTuple):
    """Whoever asked for the open cycle does not want it any more."""

    reason: str


Input = Request | ServerEvent | Tick | Abandon


class Decision(NamedTuple):
    """What follows from an input. Records are to be stored before commands are carried out."""

    fleet: FleetView
    commands: tuple[Issued, ...] = ()
    records: tuple[Record, ...] = ()
    refusal: Refusal | None = None
    closed: Cycle | None = None
    """The cycle that ended here."""


Decide = Callable[[FleetView, Input, float, Rules], Decision]
"""What a controller runs by: `decide`, or what stands in for it in a check."""


def decide(
    fleet: FleetView, given: Input, now_s: float, rules: Rules, plays: Playbook = PLAYBOOK
) -> Decision:
    """What follows from one input."""
    plan = _Plan(fleet, now_s, rules, plays)
    phase = fleet.cycle.phase if fleet.cycle else None
    touched: Iterable[str] = plan.servers
    if isinstance(given, Request):
        why = refusal(fleet, given, rules, plays.goals)
        if why is not None:
            plan.turn(Turn.REFUSED, f"{given.goal}: {why.server}: {why.rule}")
            return Decision(fleet, (), tuple(plan.records), why)
        if is_met(fleet, given, rules):
            plan.turn(Turn.ABSORBED, f"{given.goal}: met already")
            return Decision(fleet, (), tuple(plan.records))
        plan.open(given)
    elif isinstance(given, ServerEvent):
        plan.happen(given.server, given.event)
        if plan.fleet.cycle is not None and plan.fleet.cycle.phase is phase:
            touched = (given.server,)
    elif isinstance(given, Abandon):
        plan.abandon(given.reason)
    else:
        plan.expire()
    plan.advance(touched)
    return Decision(plan.result(), tuple(plan.commands), tuple(plan.records), None, plan.closed)


def next_deadline_s(fleet: FleetView) -> float | None:
    """When the planner wants a Tick, or None."""
    times = [view.pending.deadline_s for view in fleet.servers.values() if view.pending]
    if fleet.cycle is not None:
        working = fleet.cycle.phase is Phase.WORKING
        times.append(fleet.cycle.deadline_s if working else fleet.cycle.closes_s)
    return min(times, default=None)


class _Plan:
    """The working state of one decision: never outlives `decide`."""

    def __init__(self, fleet: FleetView, now_s: float, rules: Rules, plays: Playbook) -> None:
        self.fleet = fleet
        """All but the servers, which are in `servers` until `result`."""
        self.servers = dict(fleet.servers)
        self.now_s = now_s
        self.rules = rules
        self.plays = plays
        self.commands: list[Issued] = []
        self.records: list[Record] = []
        self.closed: Cycle | None = None

    def result(self) -> FleetView:
        return self.fleet._replace(servers=self.servers)

    # -- cycles --------------------------------------------------------------------------------------

    def turn(self, turn: Turn, reason: str = "", serving: int | None = None) -> None:
        before = self.fleet.serving_version
        if serving is not None:
            self.fleet = self.fleet._replace(serving_version=serving)
        after = self.fleet.serving_version
        self.records.append(FleetRecord(turn, self.fleet.cycle, before, after, reason))

    def open(self, request: Request) -> None:
        number = self.fleet.last_cycle + 1
        enrols = request.goal is Goal.ENROL
        members = frozenset(name for name, view in self.servers.items() if enrols or usable(view))
        if request.goal is Goal.COMMIT:  # the guards let it begin without servers that dropped out
            members = frozenset(
                name
                for name in members
                if holds_staged(self.servers[name], self.fleet.staged, request.version)
            )
        version = request.version if request.goal in OF_A_VERSION else self.fleet.serving_version
        cycle = Cycle(
            number,
            request.goal,
            members,
            version,
            request.chunk_bytes,
            self.now_s,
            self.now_s + self.rules.cycle_s,
            self.now_s + self.rules.cycle_s + self.rules.grace_s,
        )
        self.fleet = self.fleet._replace(cycle=cycle, last_cycle=number)
        self.turn(Turn.OPENED)

    def _update(self, **changes: object) -> None:
        assert self.fleet.cycle is not None  # noqa: S101 - for the type checker; callers hold a cycle
        self.fleet = self.fleet._replace(cycle=self.fleet.cycle._replace(**changes))  # type: ignore[arg-type]

    def _abort(self, reason: str) -> None:
        cycle = self.fleet.cycle
        latest_s = max(cycle.closes_s, self.now_s + self.rules.grace_s) if cycle else 0.0
        self._update(phase=Phase.ABORTING, reason=reason, closes_s=latest_s)
        self.turn(Turn.ABORTING, reason)

    def abandon(self, reason: str) -> None:
        """Take no further step toward the goal. After the commit there is nothing left to give up."""
        if self.fleet.cycle is not None and self.fleet.cycle.phase is Phase.WORKING:
            self._abort(reason)

    def _drop(self, server: str, reason: str) -> None:
        """A server drops out of the open cycle, and the policy says what that means for the others."""
        cycle = self.fleet.cycle
        if cycle is None or server not in cycle.members:
            return
        again = server in cycle.failed_servers
        if again and (cycle.phase is Phase.WORKING or server in cycle.given_up):
            return
        if not again:  # the first error is the one that explains
            self._update(failed=(*cycle.failed, (server, reason)))
        if cycle.phase is not Phase.WORKING:
            self._update(given_up=cycle.given_up | {server})
        left = len(cycle.members) - len(cycle.failed) - 1
        spared = self.rules.on_failure is FailurePolicy.QUARANTINE and left >= max(1, self.rules.floor)
        if cycle.phase is Phase.WORKING and not spared:
            self._abort(f"{server}: {reason}")
        else:
            self.turn(Turn.DROPPED, f"{server}: {reason}")

    # -- servers -------------------------------------------------------------------------------------

    def _judged(self, server: str, event: Event) -> ServerRecord:
        before = self.servers[server]
        facts = self.fleet.facts
        judgement = judge(before, event, facts, self.plays.book)
        after = before
        if judgement.verdict is Verdict.TAKE:
            after = apply(before, event, facts, judgement.row, self.plays.book)
            self.servers[server] = after
            self._count(before, after)
        record = ServerRecord(
            server,
            event,
            facts,
            judgement.verdict,
            judgement.row.id,
            judgement.guards,
            judgement.rule,
            before,
            after,
        )
        self.records.append(record)
        return record

    def _count(self, before: ServerView, after: ServerView) -> None:
        """Keep the number of members with a command in flight."""
        change = (after.pending is not None) - (before.pending is not None)
        cycle = self.fleet.cycle
        if change and cycle is not None and after.server in cycle.members:
            self._update(busy=cycle.busy + change)

    def happen(self, server: str, event: Event) -> None:
        record = self._judged(server, event)
        if record.verdict is not Verdict.TAKE:
            return
        after = record.after
        if event.name is EventName.DIED:
            self._drop(server, event.detail)
        elif after.attempts and self._gives_up(after, event):
            self._drop(server, f"{_command_of(record)}: {event.detail}")

    def _gives_up(self, view: ServerView, event: Event) -> bool:
        """A command did not end well: is that the end for this server in this cycle."""
        may_repeat = event.name is EventName.LOST and view.condition is not Condition.SUSPECT
        return not may_repeat or view.attempts >= self.rules.attempts

    def _next_step(self, view: ServerView) -> Step | None:
        """What the server has to do now in the open cycle, if anything."""
        cycle = self.fleet.cycle
        if cycle is None or view.pending is not None or view.server not in cycle.members:
            return None
        if self.now_s >= cycle.closes_s or view.server in cycle.given_up:
            return None
        if cycle.phase is Phase.ABORTING:
            if not self._may_go_back(view):
                return None
        elif view.server in cycle.failed_servers:
            return None
        return next_step(self._steps(cycle), view, cycle, self.rules)

    def _steps(self, cycle: Cycle) -> tuple[Step, ...]:
        """What a server does in a cycle's phase."""
        if cycle.phase is Phase.COMMITTED:
            return self.plays.opening
        steps = self.plays.going_back if cycle.phase is Phase.ABORTING else self.plays.programs
        return steps[cycle.goal]

    def _issue(self, server: str) -> bool:
        """Issue the server's next command, if it has one. False when there is nothing to issue."""
        cycle = self.fleet.cycle
        view = self.servers[server]
        step = self._next_step(view)
        if cycle is None or step is None:
            return False
        command = step.command(view, cycle, self.rules)
        wait_s = self.rules.deadline_s(command.kind) + command.chunk_bytes / self.rules.push_bytes_per_s
        deadline_s = min(self.now_s + wait_s, cycle.closes_s)
        asked = Event(EventName(command.kind.value), command, cycle.id, deadline_s=deadline_s)
        record = self._judged(server, asked)
        if record.verdict is not Verdict.TAKE:
            self._drop(server, f"{command.kind} is refused: {record.rule}")
            return True
        self.commands.append(Issued(server, cycle.id, record.after.seq, command, deadline_s))
        return True

    def _may_go_back(self, view: ServerView) -> bool:
        """A server whose weights were not touched serves again, the one that failed too if it can."""
        held = self.rules.on_failure is FailurePolicy.HOLD
        return not held and usable(view) and can_go_back(view, self.fleet.facts)

    # -- time ----------------------------------------------------------------------------------------

    def expire(self) -> None:
        for view in tuple(self.servers.values()):
            pending = view.pending
            if pending is not None and pending.deadline_s <= self.now_s:
                detail = f"no answer to {pending.command.kind} within its deadline"
                self.happen(
                    view.server, Event(EventName.LOST, cycle=pending.cycle, seq=pending.seq, detail=detail)
                )
        cycle = self.fleet.cycle
        if cycle is not None and cycle.phase is Phase.WORKING and cycle.deadline_s <= self.now_s:
            self._abort(f"not done within {self.rules.cycle_s:g} s")

    def advance(self, touched: Iterable[str]) -> None:
        """Issue what can be issued, commit when all that count are ready, close when nothing is left.

        Only the servers touched by the input can have a next command, unless the cycle turns: so one
        answer costs the same in a fleet of any size.
        """
        while self.fleet.cycle is not None:
            phase = self.fleet.cycle.phase
            for server in touched:
                while self._issue(server):
                    pass
            cycle = self.fleet.cycle
            if cycle.phase is phase and cycle.busy:
                return
            if cycle.phase is phase:
                self._turn_over(cycle)
            touched = self.servers

    def _turn_over(self, cycle: Cycle) -> None:
        """No server does anything any more in this phase."""
        waiting = [name for name in cycle.members - cycle.failed_servers if not self._is_ready(name, cycle)]
        if cycle.phase is Phase.WORKING and waiting:  # the time was up before they were ready
            self._abort(f"not done within {self.rules.cycle_s:g} s: {', '.join(sorted(waiting))}")
        elif cycle.phase is Phase.WORKING and cycle.goal not in WITHOUT_COMMIT:
            self._commit(cycle)
        else:
            self._close()

    def _is_ready(self, server: str, cycle: Cycle) -> bool:
        """Whether a server has done all that the goal asks for before the commit."""
        view = self.servers[server]
        if view.pending is not None:
            return False
        return next_step(self._steps(cycle), view, cycle, self.rules) is None

    def _commit(self, cycle: Cycle) -> None:
        ready = [view for name, view in self.servers.items() if name in cycle.members - cycle.failed_servers]
        why = unfit(ready, self.rules) if cycle.goal is Goal.ENROL else differing_checksums(ready)
        if why:
            self._abort(why)
            return
        self._update(phase=Phase.COMMITTED)
        pushed = {Goal.REFIT: cycle.id, Goal.COMMIT: self.fleet.staged}
        self.fleet = self.fleet._replace(serving_push=pushed.get(cycle.goal, self.fleet.serving_push))
        self.turn(Turn.COMMITTED, serving=cycle.version)

    def _close(self) -> None:
        cycle = self.fleet.cycle
        if cycle is not None and cycle.phase is Phase.ABORTING:
            for name in [name for name in self.servers if name in cycle.members]:
                ended = Event(EventName.UNCOMMITTED, cycle=cycle.id, detail=f"not committed: {cycle.reason}")
                self._judged(name, ended)
        if cycle is not None and cycle.goal is Goal.STAGE and cycle.phase is Phase.WORKING:
            self.fleet = self.fleet._replace(staged=cycle.id)
        self.closed = self.fleet.cycle
        self.turn(Turn.CLOSED)
        self.fleet = self.fleet._replace(cycle=None)


def _command_of(record: ServerRecord) -> str:
    pending = record.before.pending
    return pending.command.kind.value if pending else record.event.name.value


def is_reached(cycle: Cycle) -> bool:
    """Whether a closed cycle reached its goal on at least one server."""
    done = Phase.WORKING if cycle.goal in WITHOUT_COMMIT else Phase.COMMITTED
    return cycle.phase is done and len(cycle.failed) < len(cycle.members)
