"""The real planner on a whole fleet, asked once for all that differ in nothing it could see.

What a fleet knows as one (the version that it serves, the open cycle and who dropped out of it) is its
centre. Beside it a server's future hangs on its own view alone. So one run of `decide`, with any server in
each seat, says what becomes of the centre; and what becomes of a server is the same whoever sits beside it.
Both are checked as they are used: where another server in a seat would change the centre, it is `Entangled`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from refitfsm.check.codes import CLOSES_S, DEADLINE_S, Codes
from refitfsm.check.moves import World
from refitfsm.check.search import Seen, noted, serving_after
from refitfsm.model.fleet import Cycle, FleetView
from refitfsm.model.records import FleetRecord, ServerRecord
from refitfsm.model.values import CommandKind, Facts, ServerView
from refitfsm.planner.cycle import Input

LAST_CYCLE = 9_999
"""Higher than every code of a cycle."""
BUSY = 1_000
"""Commands in flight elsewhere: so many that the cycle does not turn by itself."""


class Entangled(AssertionError):
    """What happens to a fleet depends on more of its servers than the check takes apart."""


class BrokenLaw(Exception):
    """A law does not hold."""


class Flags(NamedTuple):
    """What the open cycle holds of one server."""

    member: bool = False
    failed: bool = False
    given_up: bool = False


class Centre(NamedTuple):
    """What the fleet knows as one, in codes."""

    serving_version: int
    staged: int
    serving_push: int
    truly_serving: int
    """The push whose weights the fleet serves, by what was committed."""
    cycle: Cycle | None
    """Without what it holds of its members."""


class Outcome(NamedTuple):
    """What becomes of a fleet."""

    centre: Centre
    flags: tuple[Flags, ...]
    raw: tuple[ServerView, ...]
    """In the codes of the old centre."""
    codes: Codes
    """From those of the old to those of the new."""
    turns: tuple[tuple[str, int, int], ...]
    """How the cycle turned, with the number of those that had failed, and were given up, by then."""
    issued: tuple[CommandKind | None, ...]

    def view(self, seat: int) -> ServerView:
        """In the codes of the new centre."""
        return self.codes.view(self.raw[seat])


class Question(NamedTuple):
    """What the planner is asked, beside the fleet itself."""

    name: str
    given: Input
    now_s: float = 0.0
    busy: bool = False
    """Others have commands in flight."""


def centre_of(fleet: FleetView, truly_serving: int, attempts_max: int) -> tuple[Centre, Codes]:
    """A fleet's centre in codes, and the codes."""
    cycle = fleet.cycle
    codes = Codes.of(
        fleet.serving_version,
        (fleet.staged, fleet.serving_push, truly_serving),
        cycle.id if cycle else 0,
        attempts_max,
    )
    alone = cycle and cycle._replace(
        id=codes.cycle(cycle.id),
        members=frozenset(),
        version=codes.version(cycle.version),
        started_s=0.0,
        deadline_s=DEADLINE_S,
        closes_s=CLOSES_S,
        failed=(),
        reason="",
        given_up=frozenset(),
        busy=0,
    )
    centre = Centre(
        codes.version(fleet.serving_version),
        codes.cycle(fleet.staged),
        codes.cycle(fleet.serving_push),
        codes.cycle(truly_serving),
        alone,
    )
    return centre, codes


def fleet_of(
    centre: Centre, flags: tuple[Flags, ...], views: tuple[ServerView, ...], *, busy: bool = False
) -> FleetView:
    """A fleet with these servers in its seats."""
    servers = {f"s{seat}": view._replace(server=f"s{seat}") for seat, view in enumerate(views)}
    cycle = centre.cycle
    if cycle is not None:
        seated = tuple(zip(servers, flags, strict=True))
        members = [name for name, each in seated if each.member]
        waiting = sum(servers[name].pending is not None for name in members)
        cycle = cycle._replace(
            members=frozenset(members),
            failed=tuple((name, "") for name, each in seated if each.failed),
            given_up=frozenset(name for name, each in seated if each.given_up),
            busy=waiting + BUSY * busy,
        )
    return FleetView(servers, centre.serving_version, cycle, LAST_CYCLE, centre.staged, centre.serving_push)


@dataclass
class Planner:
    """The planner of a world, and what was seen of it."""

    world: World
    seen: Seen = field(default_factory=Seen)
    runs: int = 0

    def ask(
        self, centre: Centre, flags: tuple[Flags, ...], views: tuple[ServerView, ...], question: Question
    ) -> Outcome:
        """What it decides.

        Raises:
            BrokenLaw: it asks for what the table refuses.
        """
        self.runs += 1
        rules = self.world.rules
        fleet = fleet_of(centre, flags, views, busy=question.busy)
        decision = self.world.decide(fleet, question.given, question.now_s, rules)
        why = noted(decision, self.seen)
        if why:
            raise BrokenLaw(why)
        after = decision.fleet
        serving = serving_after(decision, centre.truly_serving, centre.staged)
        new, codes = centre_of(after, serving, rules.attempts)
        turned = [record for record in decision.records if isinstance(record, FleetRecord)]
        return Outcome(
            new,
            tuple(flags_of(after.cycle, name) for name in after.servers),
            tuple(after.servers.values()),
            codes,
            tuple((each.turn.value, *_troubled(each.cycle)) for each in turned),
            tuple(_last_issued(decision.records, name) for name in after.servers),
        )


def facts_of(centre: Centre) -> Facts:
    """What the guards read of the fleet."""
    return Facts(centre.serving_version, centre.cycle.id if centre.cycle else 0, centre.serving_push)


def flags_of(cycle: Cycle | None, name: str) -> Flags:
    if cycle is None:
        return Flags()
    return Flags(name in cycle.members, name in cycle.failed_servers, name in cycle.given_up)


def _troubled(cycle: Cycle | None) -> tuple[int, int]:
    return (len(cycle.failed), len(cycle.given_up)) if cycle else (0, 0)


def _last_issued(records: tuple[object, ...], name: str) -> CommandKind | None:
    asked = [
        record.event.command.kind
        for record in records
        if isinstance(record, ServerRecord) and record.server == name and record.event.command is not None
    ]
    return asked[-1] if asked else None
