"""Judge the turns of a run's cycles, against the policy that the journal says it ran under.

The version that the fleet serves moves at a commit and nowhere else; a commit finds every member that
counts ready, and leaves out none that the policy does not let it leave out; a server drops out only after
trouble; nothing is issued outside the open cycle or after its time.
"""

from collections.abc import Mapping

from refitfsm.audit.asked import Asked, answer
from refitfsm.audit.broken import Broken
from refitfsm.audit.commands import CommandAudit
from refitfsm.model.fitness import differing_checksums, unfit
from refitfsm.model.fleet import OF_A_VERSION, WITHOUT_COMMIT, Cycle, Goal, Phase, usable
from refitfsm.model.records import FleetRecord, InputKind, InputRecord, ServerRecord, Turn
from refitfsm.model.row import Verdict
from refitfsm.model.rules import FailurePolicy, Rules
from refitfsm.model.states import Condition, Gate, ServerState
from refitfsm.model.values import REQUESTS, Event, EventName, Facts, ServerView

_REQUESTS = frozenset(REQUESTS)


class CycleAudit:
    """Folds the turns. `views` are the servers' last states, kept by whoever folds the servers."""

    def __init__(self, rules: Rules, views: Mapping[str, ServerView]) -> None:
        self.rules = rules
        self._commands = CommandAudit(rules)
        self.views = views
        self.serving = 0
        self.serving_push = 0
        """The cycle that pushed what is served."""
        self.cycle: Cycle | None = None
        self.busy = 0
        """Members of the open cycle with a command in flight."""
        self._staged = 0
        """The last cycle that staged weights."""
        self.turns = dict.fromkeys(Turn, 0)
        self.reached = 0
        self._last_cycle = 0
        self._given: InputRecord | None = None
        """What the step was given, unless it is a server's event."""
        self._trouble: tuple[str, str] | None = None
        """The server of the record before, and why, if it drops out for it."""
        self._uncommitted: list[str] = []
        """Servers that were told in this step that the cycle did not commit."""

    # -- steps and servers ---------------------------------------------------------------------------

    def begin_step(self, given: InputRecord | None) -> None:
        """A step is over, and the next begins."""
        self.end_step()
        self._given = given
        self._trouble = None

    def end_step(self) -> None:
        """A cycle that is open after a step waits for somebody: else the step would have gone on."""
        if self.cycle is not None and not self.busy:
            raise Broken(f"cycle {self.cycle.id} is open, and nothing is in flight for it")
        if self._uncommitted:
            raise Broken(f"{self._uncommitted[0]} is told of a cycle's end that does not come")

    def see(self, record: ServerRecord, at_s: float) -> None:
        """A server's record: was it the cycle's to make, and does the server drop out for it."""
        name, event, before, after = record.server, record.event, record.before, record.after
        self._trouble = None
        if event.name in _REQUESTS:
            self._check_issue(record, at_s)
            if record.verdict is Verdict.REFUSE:
                self._trouble = (name, f"{event.name} is refused: {record.rule}")
        elif event.name is EventName.UNCOMMITTED:
            self._check_uncommitted(record)
        elif record.verdict is Verdict.TAKE and event.name is EventName.DIED:
            self._trouble = (name, event.detail)
        elif record.verdict is Verdict.TAKE and self._gives_up(after, event):
            command = before.pending.command.kind.value if before.pending else event.name.value
            self._trouble = (name, f"{command}: {event.detail}")
        change = (after.pending is not None) - (before.pending is not None)
        if change and self.cycle is not None and name in self.cycle.members:
            self.busy += change

    def _gives_up(self, view: ServerView, event: Event) -> bool:
        """A lost command that may be repeated is, as often as the policy says; others are not."""
        if event.name is EventName.LOST and view.condition is not Condition.SUSPECT:
            return view.attempts >= self.rules.attempts
        return view.attempts > 0

    def _check_issue(self, record: ServerRecord, at_s: float) -> None:
        """A command goes to a member of the open cycle, under that cycle's number, within its time."""
        name, cycle = record.server, self.cycle
        if cycle is None or name not in cycle.members or record.event.cycle != cycle.id:
            raise Broken(f"{name}: {record.event.name} was issued outside the open cycle")
        out = cycle.given_up if cycle.phase is Phase.ABORTING else cycle.failed_servers
        if name in out:
            raise Broken(f"{name}: {record.event.name} was issued after it dropped out")
        if at_s >= cycle.closes_s:
            raise Broken(f"{name}: {record.event.name} was issued past the end of cycle {cycle.id}")
        self._commands.check(record.before, record.event, cycle, at_s)

    def _check_uncommitted(self, record: ServerRecord) -> None:
        cycle = self.cycle
        if cycle is None or cycle.phase is not Phase.ABORTING or self.busy:
            raise Broken(f"{record.server}: is told of a cycle's end that has not come")
        detail = f"not committed: {cycle.reason}"
        if record.event != Event(EventName.UNCOMMITTED, cycle=cycle.id, detail=detail):
            raise Broken(f"{record.server}: is told something else than how cycle {cycle.id} ends")
        self._uncommitted.append(record.server)

    # -- turns ---------------------------------------------------------------------------------------

    def take(self, record: FleetRecord, at_s: float) -> None:
        """A turn of a cycle."""
        if record.serving_before != self.serving:
            raise Broken(f"version {self.serving} was served, not {record.serving_before}")
        if record.turn is not Turn.COMMITTED and record.serving_after != self.serving:
            raise Broken(f"the version that is served moves at a commit, not at {record.turn}")
        if record.reason and record.turn in (Turn.COMMITTED, Turn.CLOSED):
            raise Broken(f"{record.turn} has no reason of its own")
        if self._given is not None and record.turn in (Turn.OPENED, Turn.REFUSED, Turn.ABSORBED):
            self._check_answer(record, self._given)
        getattr(self, f"_{record.turn.value}")(record, at_s)
        self.turns[record.turn] += 1
        self.serving = record.serving_after
        self._trouble = None

    def _check_answer(self, record: FleetRecord, request: InputRecord) -> None:
        """A request is answered as the fleet was when it came."""
        facts = Facts(self.serving, self.cycle.id if self.cycle else 0, self.serving_push)
        views = tuple(view for _, view in sorted(self.views.items()))
        turn, reason = answer(Asked(request, views, facts, self._staged, self.rules))
        if (record.turn, record.reason) != (turn, reason):
            raise Broken(f"{request.goal} is to be {turn} here ({reason or 'no rule forbids it'})")

    def _refused(self, record: FleetRecord, _at_s: float) -> None:
        self._becomes(record, self.cycle)

    def _absorbed(self, record: FleetRecord, _at_s: float) -> None:
        self._becomes(record, self.cycle)

    def _opened(self, record: FleetRecord, at_s: float) -> None:
        cycle = record.cycle
        if self.cycle is not None:
            raise Broken(f"cycle {self.cycle.id} is open: one cycle at a time")
        if cycle is None or cycle.id != self._last_cycle + 1:
            raise Broken("a cycle opens under the next number")
        enrols = cycle.goal is Goal.ENROL
        members = {name for name, view in self.views.items() if enrols or usable(view)}
        if cycle.goal is Goal.COMMIT:
            members = {name for name in members if is_committable(self.views[name], cycle, self._staged)}
        if cycle.members != members:
            raise Broken("a cycle opens with every server that can be used")
        of_its_own = cycle.goal in OF_A_VERSION
        if of_its_own and cycle.version <= self.serving:
            raise Broken(f"version {cycle.version} is not above version {self.serving}")
        if not of_its_own and cycle.version != self.serving:
            raise Broken(f"{cycle.goal} keeps version {self.serving}")
        ends_s = at_s + self.rules.cycle_s
        times_s = (at_s, ends_s, ends_s + self.rules.grace_s)
        if cycle != Cycle(cycle.id, cycle.goal, cycle.members, cycle.version, cycle.chunk_bytes, *times_s):
            raise Broken(f"cycle {cycle.id} opens with another deadline than the policy's, or under way")
        self.cycle, self._last_cycle, self.busy = cycle, cycle.id, 0

    def _dropped(self, record: FleetRecord, _at_s: float) -> None:
        cycle = self._open_cycle(record)
        name, why = self._trouble or ("nobody", "")
        if name not in cycle.members or record.reason != f"{name}: {why}":
            raise Broken(f"a server drops out of cycle {cycle.id} without a reason")
        after = cycle
        if name not in cycle.failed_servers:
            after = after._replace(failed=(*cycle.failed, (name, why)))
        if cycle.phase is not Phase.WORKING:
            after = after._replace(given_up=cycle.given_up | {name})
        elif not self._may_spare(after):
            raise Broken(f"cycle {cycle.id} goes on without {name}, which its policy does not allow")
        self._becomes(record, after)

    def _aborting(self, record: FleetRecord, at_s: float) -> None:
        cycle = self._open_cycle(record)
        if cycle.phase is not Phase.WORKING:
            raise Broken("a cycle aborts only while it works toward its goal")
        closes_s = max(cycle.closes_s, at_s + self.rules.grace_s)
        after = cycle._replace(phase=Phase.ABORTING, reason=record.reason, closes_s=closes_s)
        name, why = self._trouble or ("nobody", "")
        if record.reason == f"{name}: {why}" and name in cycle.members - cycle.failed_servers:
            after = after._replace(failed=(*cycle.failed, (name, why)))
            if self._may_spare(after):
                raise Broken(f"cycle {cycle.id} aborts for {name}, and its policy has it go on")
        elif not self._aborts_for(record.reason, cycle, at_s):
            raise Broken(f"cycle {cycle.id} aborts without a reason, or for one that is not so")
        self._becomes(record, after)

    def _aborts_for(self, reason: str, cycle: Cycle, at_s: float) -> bool:
        """Whether a cycle may abort for this, where no server dropped out."""
        given = self._given.given if self._given else None
        if given is InputKind.ABANDON and self._given is not None:
            return reason == self._given.reason
        late = f"not done within {self.rules.cycle_s:g} s"
        if reason == late:
            return given is InputKind.TICK and at_s >= cycle.deadline_s
        if self.busy:
            return False
        if reason.startswith(f"{late}: "):
            named = reason.removeprefix(f"{late}: ").split(", ")
            return at_s >= cycle.closes_s and cycle.members - cycle.failed_servers >= set(named)
        return reason == self._unfit(self._counted(cycle), cycle)

    def _committed(self, record: FleetRecord, _at_s: float) -> None:
        cycle = self._open_cycle(record)
        if cycle.phase is not Phase.WORKING or cycle.goal in WITHOUT_COMMIT:
            raise Broken("a cycle commits once, if its goal has a commit")
        self._becomes(record, cycle._replace(phase=Phase.COMMITTED))
        pushed = {Goal.REFIT: cycle.id, Goal.COMMIT: self._staged}
        self.serving_push = pushed.get(cycle.goal, self.serving_push)
        if record.serving_after != cycle.version:
            raise Broken(f"cycle {cycle.id} commits version {cycle.version}, not {record.serving_after}")
        ready = self._counted(cycle)
        for view in ready:
            if not is_ready(view, cycle):
                raise Broken(f"cycle {cycle.id} commits although {view.server} is not ready")
        if cycle.failed and not self._may_spare(cycle):
            raise Broken(f"cycle {cycle.id} commits without servers that its policy asks for")
        why = self._unfit(ready, cycle)
        if why:
            raise Broken(f"cycle {cycle.id} commits although {why}")
        if cycle.goal in (Goal.REFIT, Goal.COMMIT) and self.rules.verify.needs_checksums:
            for view in ready:
                if not view.checksum:
                    raise Broken(f"{view.server} is committed without the checksum that the policy asks for")

    def _counted(self, cycle: Cycle) -> list[ServerView]:
        """Members that did not drop out."""
        return [self.views[name] for name in sorted(cycle.members - cycle.failed_servers)]

    def _unfit(self, ready: list[ServerView], cycle: Cycle) -> str:
        return unfit(ready, self.rules) if cycle.goal is Goal.ENROL else differing_checksums(ready)

    def _may_spare(self, cycle: Cycle) -> bool:
        """The policy lets a cycle go on without the servers that failed."""
        left = len(cycle.members) - len(cycle.failed)
        return self.rules.on_failure is FailurePolicy.QUARANTINE and left >= max(1, self.rules.floor)

    def _closed(self, record: FleetRecord, at_s: float) -> None:
        cycle = self._open_cycle(record)
        waiting = [name for name in sorted(cycle.members) if self.views[name].pending]
        if waiting:
            raise Broken(f"cycle {cycle.id} closes with a command in flight to {waiting[0]}")
        told, self._uncommitted = self._uncommitted, []
        if told != (sorted(cycle.members) if cycle.phase is Phase.ABORTING else []):
            raise Broken(f"cycle {cycle.id} closes, and not all of its servers are told how")
        left = self._counted(cycle)
        if cycle.phase is Phase.WORKING and cycle.goal not in WITHOUT_COMMIT:
            raise Broken(f"cycle {cycle.id} closes without a commit or an abort")
        for view in left:
            if cycle.phase is Phase.WORKING and not self._is_there(view, cycle):
                raise Broken(f"cycle {cycle.id} closes, and {view.server} has not reached its goal")
            if cycle.phase is Phase.COMMITTED and view.gate is not Gate.OPEN and at_s < cycle.closes_s:
                raise Broken(f"cycle {cycle.id} closes, and {view.server} was not told to go on")
        if cycle.phase is Phase.WORKING and cycle.goal is Goal.STAGE:
            self._staged = cycle.id
        self.reached += cycle.phase is (Phase.WORKING if cycle.goal in WITHOUT_COMMIT else Phase.COMMITTED)
        self._becomes(record, cycle)
        self.cycle = None

    def _is_there(self, view: ServerView, cycle: Cycle) -> bool:
        """Whether a server has what a cycle without a commit is for."""
        if cycle.goal is Goal.STAGE:
            return is_staged(view, cycle)
        return not self.rules.release_tags & view.resident

    def _open_cycle(self, record: FleetRecord) -> Cycle:
        if self.cycle is None or record.cycle is None or record.cycle.id != self.cycle.id:
            raise Broken(f"{record.turn} is not about the open cycle")
        return self.cycle

    def _becomes(self, record: FleetRecord, after: Cycle | None) -> None:
        """The cycle is what the turn makes of it, and nothing else."""
        counted = after._replace(busy=self.busy) if after else None
        if record.cycle != counted:
            raise Broken(f"more or less of the cycle changed than {record.turn} changes")
        self.cycle = counted


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
