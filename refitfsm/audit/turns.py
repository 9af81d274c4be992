"""Judge the turns of a run's cycles, against the policy that the journal says it ran under.

The version that the fleet serves moves at a commit and nowhere else; a commit finds every member that
counts ready, and leaves out none that the policy does not let it leave out; a server drops out only after
trouble; nothing is issued outside the open cycle or after its time.
"""

from collections.abc import Mapping

from refitfsm.audit.broken import Broken
from refitfsm.model.fleet import OF_A_VERSION, WITHOUT_COMMIT, Cycle, Goal, Phase, usable
from refitfsm.model.records import FleetRecord, ServerRecord, Turn
from refitfsm.model.row import Verdict
from refitfsm.model.rules import FailurePolicy, Rules
from refitfsm.model.states import Condition, Gate, ServerState
from refitfsm.model.values import REQUESTS, EventName, ServerView

_TROUBLE = (EventName.REFUSED, EventName.FAILED, EventName.LOST, EventName.DIED)


class CycleAudit:
    """Folds the turns. `views` are the servers' last states, kept by whoever folds the servers."""

    def __init__(self, rules: Rules, views: Mapping[str, ServerView]) -> None:
        self.rules = rules
        self.views = views
        self.serving = 0
        self.serving_push = 0
        """The cycle that pushed what is served."""
        self.cycle: Cycle | None = None
        self._staged = 0
        """The last cycle that staged weights."""
        self.turns = dict.fromkeys(Turn, 0)
        self.reached = 0
        self._last_cycle = 0
        self._troubled: set[str] = set()
        """Servers whose last record is one that a server may drop out for."""

    def see(self, record: ServerRecord, at_s: float) -> None:
        """A server's record: was it the cycle's to make, and may the server drop out for it."""
        asked = record.event.name in REQUESTS
        if asked and record.verdict is Verdict.TAKE:
            self._check_issue(record, at_s)
        refused = asked and record.verdict is Verdict.REFUSE
        failed = record.verdict is Verdict.TAKE and (
            record.event.name in _TROUBLE or (not asked and record.after.attempts > record.before.attempts)
        )
        (self._troubled.add if refused or failed else self._troubled.discard)(record.server)

    def _check_issue(self, record: ServerRecord, at_s: float) -> None:
        """A command goes to a member of the open cycle, under that cycle's number, within its time."""
        name, cycle = record.server, self.cycle
        if cycle is None or name not in cycle.members or record.event.cycle != cycle.id:
            raise Broken(f"{name}: {record.event.name} was issued outside the open cycle")
        out = cycle.given_up if cycle.phase is Phase.ABORTING else cycle.failed_servers
        if name in out:
            raise Broken(f"{name}: {record.event.name} was issued after it dropped out")
        if at_s >= cycle.closes_s or record.event.deadline_s > cycle.closes_s:
            raise Broken(f"{name}: {record.event.name} was issued past the end of cycle {cycle.id}")

    def take(self, record: FleetRecord, at_s: float) -> None:
        """A turn of a cycle."""
        if record.serving_before != self.serving:
            raise Broken(f"version {self.serving} was served, not {record.serving_before}")
        if record.turn is not Turn.COMMITTED and record.serving_after != self.serving:
            raise Broken(f"the version that is served moves at a commit, not at {record.turn}")
        getattr(self, f"_{record.turn.value}")(record, at_s)
        self.turns[record.turn] += 1
        self.serving = record.serving_after

    def _refused(self, record: FleetRecord, _at_s: float) -> None:
        self._same_cycle(record)

    def _absorbed(self, record: FleetRecord, _at_s: float) -> None:
        self._same_cycle(record)

    def _opened(self, record: FleetRecord, at_s: float) -> None:
        cycle = record.cycle
        if self.cycle is not None:
            raise Broken(f"cycle {self.cycle.id} is open: one cycle at a time")
        if cycle is None or cycle.id != self._last_cycle + 1 or cycle.phase is not Phase.WORKING:
            raise Broken("a cycle opens under the next number")
        enrols = cycle.goal is Goal.ENROL
        members = {name for name, view in self.views.items() if enrols or usable(view)}
        if cycle.goal is Goal.COMMIT:
            members = {name for name in members if is_committable(self.views[name], cycle, self._staged)}
        if cycle.members != members or cycle.failed or cycle.given_up:
            raise Broken("a cycle opens with every server that can be used, none of them failed")
        if cycle.goal in OF_A_VERSION and cycle.version <= self.serving:
            raise Broken(f"version {cycle.version} is not above version {self.serving}")
        deadline_s = at_s + self.rules.cycle_s
        times_s = (at_s, deadline_s, deadline_s + self.rules.grace_s)
        if (cycle.started_s, cycle.deadline_s, cycle.closes_s) != times_s:
            raise Broken(f"cycle {cycle.id} has another deadline than the policy's")
        self.cycle, self._last_cycle = cycle, cycle.id

    def _dropped(self, record: FleetRecord, at_s: float) -> None:
        after = self._advance(record, at_s, Phase.WORKING, Phase.COMMITTED, Phase.ABORTING)
        if after.phase is Phase.WORKING:
            self._check_spared(after)

    def _aborting(self, record: FleetRecord, at_s: float) -> None:
        if self._open_cycle(record).phase is not Phase.WORKING:
            raise Broken("a cycle aborts only while it works toward its goal")
        self._advance(record, at_s, Phase.ABORTING)

    def _committed(self, record: FleetRecord, at_s: float) -> None:
        cycle = self._open_cycle(record)
        if cycle.phase is not Phase.WORKING:
            raise Broken("a cycle commits once")
        self._advance(record, at_s, Phase.COMMITTED)
        pushed = {Goal.REFIT: cycle.id, Goal.COMMIT: self._staged}
        self.serving_push = pushed.get(cycle.goal, self.serving_push)
        if record.serving_after != cycle.version:
            raise Broken(f"cycle {cycle.id} commits version {cycle.version}, not {record.serving_after}")
        ready = [self.views[name] for name in sorted(cycle.members - cycle.failed_servers)]
        for view in ready:
            if not is_ready(view, cycle):
                raise Broken(f"cycle {cycle.id} commits although {view.server} is not ready")
        if cycle.failed:
            self._check_spared(cycle)
        if cycle.goal in (Goal.REFIT, Goal.COMMIT):
            self._check_checksums(ready)

    def _check_spared(self, cycle: Cycle) -> None:
        """The policy lets a cycle go on without the servers that failed."""
        left = len(cycle.members) - len(cycle.failed)
        if self.rules.on_failure is not FailurePolicy.QUARANTINE or left < max(1, self.rules.floor):
            raise Broken(f"cycle {cycle.id} goes on with {left} servers, which its policy does not allow")

    def _check_checksums(self, ready: list[ServerView]) -> None:
        sums: dict[int, str] = {}
        for view in ready:
            if self.rules.verify.needs_checksums and not view.checksum:
                raise Broken(f"{view.server} is committed without the checksum that the policy asks for")
            if sums.setdefault(view.capabilities.tp_size, view.checksum) != view.checksum:
                raise Broken(f"{view.server} is committed with another checksum than the others'")

    def _closed(self, record: FleetRecord, _at_s: float) -> None:
        cycle = self._open_cycle(record)
        waiting = [name for name in sorted(cycle.members) if self.views[name].pending]
        if waiting:
            raise Broken(f"cycle {cycle.id} closes with a command in flight to {waiting[0]}")
        if cycle.goal is Goal.RELEASE and cycle.phase is Phase.WORKING:
            for name in sorted(cycle.members - cycle.failed_servers):
                if self.rules.release_tags & self.views[name].resident:
                    raise Broken(f"cycle {cycle.id} closes as released although {name} is not")
        elif cycle.goal is Goal.STAGE and cycle.phase is Phase.WORKING:
            for name in sorted(cycle.members - cycle.failed_servers):
                if not is_staged(self.views[name], cycle):
                    raise Broken(f"cycle {cycle.id} closes as staged although {name} is not")
            self._staged = cycle.id
        elif cycle.phase is Phase.WORKING:
            raise Broken(f"cycle {cycle.id} closes without a commit or an abort")
        self.reached += cycle.phase is (Phase.WORKING if cycle.goal in WITHOUT_COMMIT else Phase.COMMITTED)
        self._same_cycle(record)
        self.cycle = None

    def _open_cycle(self, record: FleetRecord) -> Cycle:
        if self.cycle is None or record.cycle is None or record.cycle.id != self.cycle.id:
            raise Broken(f"{record.turn} is not about the open cycle")
        return self.cycle

    def _same_cycle(self, record: FleetRecord) -> None:
        if _without_count(record.cycle) != _without_count(self.cycle):
            raise Broken(f"the cycle changed at {record.turn}")

    def _advance(self, record: FleetRecord, at_s: float, *phases: Phase) -> Cycle:
        """The cycle may change its phase as the turn says and lose servers that had trouble; no more."""
        before, after = self._open_cycle(record), record.cycle
        if after is None or after.phase not in phases:
            raise Broken(f"a cycle is {', '.join(phases)} after {record.turn}")
        closes_s = before.closes_s
        if record.turn is Turn.ABORTING:
            closes_s = max(closes_s, at_s + self.rules.grace_s)
        kept = before._replace(
            phase=after.phase,
            failed=after.failed,
            given_up=after.given_up,
            reason=after.reason,
            closes_s=closes_s,
            busy=after.busy,
        )
        lost = after.failed[len(before.failed) :]
        if kept != after or after.failed != (*before.failed, *lost):
            raise Broken(f"more of the cycle changed than {record.turn} changes")
        for name in {name for name, _ in lost} | (after.given_up - before.given_up):
            if name not in self._troubled:
                raise Broken(f"{name} drops out of cycle {after.id} without a reason")
        self.cycle = after
        return after


def _without_count(cycle: Cycle | None) -> Cycle | None:
    return cycle._replace(busy=0) if cycle else None


def is_ready(view: ServerView, cycle: Cycle) -> bool:
    """What a commit asks of a member, said once more and otherwise than the planner says it."""
    whole = view.content.proved and view.content.version == cycle.version and not view.released
    if view.pending is not None or view.session:
        return False
    if cycle.goal is Goal.ENROL:
        return view.state is not ServerState.OFFLINE
    if cycle.goal is Goal.REFIT:
        return whole and view.state is ServerState.KV_REBUILT and view.content.cycle == cycle.id
    if cycle.goal is Goal.COMMIT:
        return whole and view.state is ServerState.KV_REBUILT
    if cycle.goal is Goal.RESUME:
        return whole and view.state in (ServerState.KV_REBUILT, ServerState.SERVING)
    return whole and view.paused and view.kv_epoch is None and view.gate is Gate.CLOSED


def is_committable(view: ServerView, cycle: Cycle, staged: int) -> bool:
    """What a commit asks of a server before it begins: the weights that were staged last, all of them."""
    content = view.content
    whole = content.proved and content.version == cycle.version and 0 < staged == content.cycle
    return whole and view.condition is Condition.HEALTHY and not view.session


def is_staged(view: ServerView, cycle: Cycle) -> bool:
    """What a stage asks of a member: this cycle's weights, proved, and nobody served by them yet."""
    content = view.content
    whole = content.proved and (content.version, content.cycle) == (cycle.version, cycle.id)
    return whole and view.session == 0 and view.paused and view.gate is Gate.CLOSED
