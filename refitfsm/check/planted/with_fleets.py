"""Mistakes with a whole fleet: whom it believes, when it commits, what it leaves behind."""

from collections.abc import Callable

from refitfsm.check.changes import (
    Wrap,
    believing,
    hearing,
    in_turn,
    leaving_out,
    saying,
    with_effect,
    with_guard,
    without_rows,
)
from refitfsm.check.planted.mistake import Bounds, Mistake
from refitfsm.model.effects import EFFECTS
from refitfsm.model.fleet import FleetView, Goal, Phase
from refitfsm.model.guards import Guard
from refitfsm.model.rules import FailurePolicy, Rules
from refitfsm.model.states import Gate
from refitfsm.model.values import (
    DONE,
    CommandKind,
    Event,
    EventName,
    Facts,
    ServerView,
)
from refitfsm.planner.cycle import Decide, Decision, Input, ServerEvent, Tick

# -- mixed versions ------------------------------------------------------------------------------------


def _published_at_once(_before: FleetView, decision: Decision) -> Decision:
    cycle = decision.fleet.cycle
    if cycle is None or cycle.goal is not Goal.REFIT:
        return decision
    return decision._replace(fleet=decision.fleet._replace(serving_version=cycle.version))


def _published_at_the_end(_before: FleetView, decision: Decision) -> Decision:
    closed = decision.closed
    if closed is None or closed.goal is not Goal.REFIT:
        return decision
    return decision._replace(fleet=decision.fleet._replace(serving_version=closed.version))


def _everybody_opens(before: FleetView, decision: Decision) -> Decision:
    cycle = decision.fleet.cycle
    if cycle is None or cycle.phase is not Phase.COMMITTED:
        return decision
    if before.cycle is None or before.cycle.phase is Phase.COMMITTED:
        return decision
    return decision._replace(fleet=decision.fleet._replace(cycle=cycle._replace(failed=())))


MIXED = (
    Mistake(
        "shows a version before any server has it",
        ("F34",),
        "The version moves when a refit begins.",
        Bounds(policy="always_on"),
        wrap=saying(_published_at_once),
    ),
    Mistake(
        "publishes what did not commit",
        ("F37",),
        "A refit that aborted ends as one that committed: with its version.",
        Bounds(faults=1, policy="always_on"),
        wrap=saying(_published_at_the_end),
    ),
    Mistake(
        "opens who dropped out as well",
        ("F35",),
        "After the commit every server goes on, whatever it holds.",
        Bounds(servers=2, faults=1, policy="always_on", floor=1),
        believing("version_is_committed", "cache_fits_the_weights", "everything_is_resident"),
        saying(_everybody_opens),
    ),
)


# -- liveness ------------------------------------------------------------------------------------------


def _patient(decides: Decide) -> Decide:
    """Time never comes to it."""

    def other(fleet: FleetView, given: Input, now_s: float, rules: Rules) -> Decision:
        return Decision(fleet) if isinstance(given, Tick) else decides(fleet, given, now_s, rules)

    return other


def _under(alter: Callable[[Rules], Rules]) -> Wrap:
    """It takes the policy for another."""

    def wrap(decides: Decide) -> Decide:
        def other(fleet: FleetView, given: Input, now_s: float, rules: Rules) -> Decision:
            return decides(fleet, given, now_s, alter(rules))

        return other

    return wrap


def _is_of_the_kind(view: ServerView, event: Event, _facts: Facts) -> bool:
    if view.pending is None:
        return False
    general = event.name in (EventName.REFUSED, EventName.FAILED, EventName.LOST)
    return general or event.name is DONE[view.pending.command.kind]


LIVENESS = (
    Mistake(
        "forgets to go on",
        ("F55",),
        "After the commit nobody is told to continue.",
        Bounds(),
        lambda plays: plays._replace(opening=()),
    ),
    Mistake(
        "waits for ever",
        ("F65", "F57"),
        "It has no deadlines: a cycle is open as long as somebody does not answer.",
        Bounds(faults=1, policy="always_on"),
        wrap=_patient,
    ),
    Mistake(
        "commits with too few",
        ("F67", "F35"),
        "It goes on with the servers that are left, where the policy wants all or none.",
        Bounds(servers=2, faults=1, policy="always_on"),
        wrap=_under(lambda rules: rules._replace(on_failure=FailurePolicy.QUARANTINE)),
    ),
    Mistake(
        "takes a late answer for the one it waits for",
        ("F65",),
        "An answer is known by its kind, and not by the number of its command.",
        Bounds(policy="always_on"),
        with_guard("answer_is_expected", Guard("answer_is_expected", _is_of_the_kind, "")),
    ),
)

# -- crashes -------------------------------------------------------------------------------------------


def _deaths_are_silence(fleet: FleetView, given: ServerEvent) -> ServerEvent:
    pending = fleet.servers[given.server].pending
    if given.event.name is not EventName.DIED or pending is None:
        return given
    lost = Event(EventName.LOST, cycle=pending.cycle, seq=pending.seq)
    return given._replace(event=lost)


def _tireless(decides: Decide) -> Decide:
    return _under(lambda rules: rules._replace(attempts=1_000_000))(hearing(_deaths_are_silence)(decides))


CRASHES = (
    Mistake(
        "asks the dead",
        ("F75", "F41"),
        "A server that is gone counts as one that did not answer, and is used again in the next cycle.",
        Bounds(faults=1, policy="always_on"),
        wrap=hearing(_deaths_are_silence),
    ),
    Mistake(
        "asks the dead without end",
        ("F71", "F77"),
        "What is not answered is repeated for ever.",
        Bounds(faults=1, policy="always_on"),
        wrap=_tireless,
    ),
    Mistake(
        "goes back to weights that a lost push may have changed",
        ("F79", "F78"),
        "A push without an answer counts as one that did nothing.",
        Bounds(faults=2, policy="always_on"),
        without_rows(lambda row: row.event is EventName.LOST and "command_moves_weights" in row.guards),
    ),
)

# -- identity ------------------------------------------------------------------------------------------


def _another(fleet: FleetView, given: ServerEvent) -> ServerEvent:
    """The last server that waits for an answer of the same kind is believed to have given it."""
    asked = fleet.servers[given.server].pending
    if asked is None or given.event.name is not DONE[asked.command.kind]:
        return given
    for view in reversed(tuple(fleet.servers.values())):
        if view.pending is not None and view.pending.command.kind is asked.command.kind:
            event = given.event._replace(cycle=view.pending.cycle, seq=view.pending.seq)
            return ServerEvent(view.server, event)
    return given


def _members_anew(_before: FleetView, decision: Decision) -> Decision:
    """Who counts is read again at every step: who dropped out is not among them any more."""
    cycle = decision.fleet.cycle
    if cycle is None or cycle.phase is not Phase.WORKING:
        return decision
    now = cycle.members - cycle.failed_servers
    return decision._replace(fleet=decision.fleet._replace(cycle=cycle._replace(members=now, failed=())))


IDENTITY = (
    Mistake(
        "takes one server's answer for another's",
        ("F86", "F87"),
        "Answers are told apart by their kind and their order.",
        Bounds(servers=2),
        wrap=hearing(_another),
    ),
    Mistake(
        "reads who takes part more than once",
        ("F91",),
        "A cycle's members are those that are well now, and not those it began with.",
        Bounds(servers=2, faults=1, policy="always_on", floor=1),
        wrap=saying(_members_anew),
    ),
)

# -- drift -----------------------------------------------------------------------------------------------


def _shadowed(view: ServerView, event: Event, facts: Facts) -> ServerView:
    """What is asked for counts as done."""
    noted = EFFECTS["note_command"](view, event, facts)
    if event.command is None or event.command.kind is not CommandKind.RELEASE:
        return noted
    tags = event.command.tags
    return noted._replace(resident=view.resident - tags, released=view.released | tags)


def _open_at_once(view: ServerView, event: Event, facts: Facts) -> ServerView:
    return EFFECTS["expect_traffic"](view, event, facts)._replace(gate=Gate.OPEN)


DRIFT = (
    Mistake(
        "has a path of its own to the same end",
        ("F97",),
        "A commit of what was staged lacks the flush that a refit has.",
        Bounds(),
        leaving_out("confirm the cache empty", goals=(Goal.COMMIT,)),
    ),
    Mistake(
        "keeps a shadow of its own",
        ("F98",),
        "A release counts from when it is asked for, whatever becomes of it.",
        Bounds(),
        with_effect("note_command", _shadowed),
    ),
    Mistake(
        "takes an accepted request for one that was carried out",
        ("F99",),
        "Requests are admitted when a server is told to go on, not when it did.",
        Bounds(),
        with_effect("expect_traffic", _open_at_once),
    ),
    Mistake(
        "speaks to a new server as to an old one",
        ("F94", "F93", "F95"),
        "It pushes without a session where a server wants one.",
        Bounds(servers_are="sessions"),
        in_turn(leaving_out("begin", "end"), believing("session_is_ready")),
    ),
)

FLEETS = (*MIXED, *LIVENESS, *CRASHES, *IDENTITY, *DRIFT)
