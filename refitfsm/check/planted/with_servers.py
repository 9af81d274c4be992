"""Mistakes with one server: the order of its steps, its cache, its memory, its weights."""

from refitfsm.check.changes import (
    Wrap,
    believing,
    hearing,
    in_turn,
    leaving_out,
    with_effect,
    with_step,
    without_rows,
)
from refitfsm.check.planted.mistake import Bounds, Mistake
from refitfsm.model.effects import EFFECTS
from refitfsm.model.fleet import Cycle, FleetView, Goal
from refitfsm.model.rules import Rules
from refitfsm.model.states import ALL_TAGS, ServerState
from refitfsm.model.values import (
    Command,
    CommandKind,
    Event,
    EventName,
    Facts,
    Report,
    ServerView,
    VerifyLevel,
)
from refitfsm.planner.cycle import ServerEvent
from refitfsm.planner.program import Step

_INTO = ("server_is_paused", "cache_is_empty")
_RESUMES = ("tags_are_released", "weights_come_first", "content_allows_the_tags")


def taking(kind: CommandKind, heard: EventName, taken: EventName) -> Wrap:
    """One end of a kind of command is taken for another."""

    def translate(fleet: FleetView, given: ServerEvent) -> ServerEvent:
        pending = fleet.servers[given.server].pending
        if given.event.name is not heard or pending is None or pending.command.kind is not kind:
            return given
        return given._replace(event=given.event._replace(name=taken))

    return hearing(translate)


# -- order -------------------------------------------------------------------------------------------


def _all_tags(step: Step) -> Step:
    return step._replace(command=lambda _v, _c, _r: Command(CommandKind.RESUME, tags=ALL_TAGS))


ORDER = (
    Mistake(
        "releases while requests run",
        ("F01", "F03", "F11"),
        "It neither pauses nor flushes before it releases memory.",
        Bounds(),
        in_turn(leaving_out("pause", "flush", goals=(Goal.RELEASE,)), believing(*_INTO)),
    ),
    Mistake(
        "pushes into memory that is released",
        ("F07",),
        "It does not resume the weights before it pushes.",
        Bounds(),
        in_turn(leaving_out("resume weights"), believing("weights_are_resident")),
    ),
    Mistake(
        "resumes everything, also what was never released",
        ("F18", "F13", "F06"),
        "It asks for all tags, where only some are released.",
        Bounds(policy="kv_only"),
        in_turn(with_step("resume the rest", _all_tags), believing(*_RESUMES)),
    ),
    Mistake(
        "serves what a release left of the weights",
        ("F15", "F14"),
        "It resumes and goes on without a push: the pages are fresh, and hold nothing.",
        Bounds(),
        in_turn(
            leaving_out("begin", "push", "verify"),
            believing("content_allows_the_tags", "content_is_proved", "version_is_committed"),
            with_step(
                "confirm the cache empty",
                lambda step: step._replace(needed=lambda view, _c, _r: _is_staged(view)),
            ),
        ),
    ),
    Mistake(
        "releases what is released",
        ("F01", "F98"),
        "It repeats a release whose answer was lost.",
        Bounds(faults=1),
        without_rows(lambda row: row.event is EventName.LOST and "command_moves_memory" in row.guards),
    ),
)


def _is_staged(view: ServerView) -> bool:
    return view.state is ServerState.WEIGHTS_STAGED


# -- stale cache -------------------------------------------------------------------------------------


def _pause_empties(view: ServerView, event: Event, facts: Facts) -> ServerView:
    return EFFECTS["note_pause"](view, event, facts)._replace(kv_epoch=None)


STALE_CACHE = (
    Mistake(
        "pushes and goes on without a flush",
        ("F21", "F27"),
        "It takes a pause for an empty cache.",
        Bounds(policy="always_on"),
        with_effect("note_pause", _pause_empties),
    ),
    Mistake(
        "takes any answer to a flush for an empty cache",
        ("F26", "F10"),
        "A flush that was refused counts as done.",
        Bounds(faults=1, policy="always_on"),
        wrap=taking(CommandKind.FLUSH, EventName.REFUSED, EventName.FLUSHED),
    ),
    Mistake(
        "takes a flush without an answer for an empty cache",
        ("F25",),
        "A flush that was lost counts as done.",
        Bounds(faults=1, policy="always_on"),
        wrap=taking(CommandKind.FLUSH, EventName.LOST, EventName.FLUSHED),
    ),
    Mistake(
        "keeps what a server cached while it went on meanwhile",
        ("F23", "F22"),
        "A continue does not count as traffic: the cache is believed to be as empty as before.",
        Bounds(policy="always_on"),
        with_effect("expect_traffic", lambda view, _e, _f: view._replace(paused=False, kv_epoch=None)),
    ),
)


# -- memory ------------------------------------------------------------------------------------------

MEMORY = (
    Mistake(
        "resumes again what may be resumed already",
        ("F39", "F41"),
        "A resume without an answer is sent once more.",
        Bounds(faults=1),
        without_rows(
            lambda row: (
                row.event is EventName.LOST
                and row.source in (ServerState.RELEASED, ServerState.WEIGHTS_STAGED)
                and "command_moves_memory" in row.guards
            )
        ),
    ),
    Mistake(
        "gives the trainer memory that a server still holds",
        ("F42",),
        "A release that was not answered counts as done.",
        Bounds(faults=1),
        wrap=taking(CommandKind.RELEASE, EventName.LOST, EventName.RELEASED),
    ),
    Mistake(
        "gives the trainer memory that was refused",
        ("F42", "F50"),
        "A release that failed counts as done.",
        Bounds(faults=1),
        wrap=taking(CommandKind.RELEASE, EventName.FAILED, EventName.RELEASED),
    ),
    Mistake(
        "releases without a memory saver",
        ("F49",),
        "It takes every server to have been started with one.",
        Bounds(memory_saver=False),
        believing("memory_saver_is_on"),
        hearing(
            lambda _fleet, given: given._replace(
                event=given.event._replace(
                    report=given.event.report._replace(
                        capabilities=given.event.report.capabilities._replace(memory_saver=True)
                    )
                )
            )
        ),
    ),
)


# -- silent updates ----------------------------------------------------------------------------------


def _only_the_last_chunk(_view: ServerView, cycle: Cycle, _rules: Rules) -> Command:
    chunks = len(cycle.chunk_bytes)
    return Command(
        CommandKind.PUSH,
        version=cycle.version,
        chunk=chunks - 1,
        chunks=chunks,
        chunk_bytes=cycle.chunk_bytes[-1],
    )


def _proved_at_once(view: ServerView, event: Event, facts: Facts) -> ServerView:
    done = EFFECTS["complete_content"](view, event, facts)
    return EFFECTS["note_proof"](done, event, facts)


def _no_difference(fleet: FleetView, given: ServerEvent) -> ServerEvent:
    pending = fleet.servers[given.server].pending
    if given.event.name is not EventName.FAILED or pending is None:
        return given
    if pending.command.kind is not CommandKind.VERIFY:
        return given
    report = Report(version=pending.command.version)
    return given._replace(event=given.event._replace(name=EventName.VERIFIED, report=report))


SILENT = (
    Mistake(
        "takes a 200 for proof",
        ("F102", "F110"),
        "Weights count as proved when the last chunk was answered.",
        Bounds(faults=1, verify=VerifyLevel.CONTENT, lies=True),
        with_effect("complete_content", _proved_at_once),
    ),
    Mistake(
        "pushes part of the model",
        ("F103", "F105"),
        "It sends the last chunk alone, and the label with it.",
        Bounds(),
        in_turn(
            with_step("push", lambda step: step._replace(command=_only_the_last_chunk)),
            believing("chunk_is_next"),
        ),
    ),
    Mistake(
        "goes on after a chunk that failed",
        ("F107", "F37"),
        "A push that failed counts as done.",
        Bounds(faults=1),
        wrap=taking(CommandKind.PUSH, EventName.FAILED, EventName.PUSHED),
    ),
    Mistake(
        "forgets that weights are mixed",
        ("F106",),
        "A server whose push failed goes back to serve what it served.",
        Bounds(faults=1, policy="always_on"),
        without_rows(lambda row: row.event is EventName.FAILED and "command_moves_weights" in row.guards),
    ),
    Mistake(
        "does not compare",
        ("F102", "F111"),
        "A proof that failed counts as given.",
        Bounds(faults=1, verify=VerifyLevel.CONTENT, lies=True),
        wrap=hearing(_no_difference),
    ),
)


# -- what is made of the weights ---------------------------------------------------------------------


def _one_in_a_session(step: Step) -> Step:
    def needed(view: ServerView, cycle: Cycle, rules: Rules) -> bool:
        return step.needed(view, cycle, rules) and not (view.session and view.content.chunks_done)

    return step._replace(needed=needed)


NUMERIC = (
    Mistake(
        "never ends a session",
        ("F127", "F114"),
        "What a server makes of its weights is made at the end of a session, which does not come.",
        Bounds(servers_are="sessions"),
        in_turn(leaving_out("end", "end stale session"), believing("session_is_closed", "session_is_ready")),
    ),
    Mistake(
        "ends a session before the last chunk",
        ("F134", "F113"),
        "What a server makes of its weights is made of half of them.",
        Bounds(servers_are="sessions"),
        in_turn(
            with_step(
                "begin",
                lambda step: step._replace(
                    needed=lambda view, cycle, _r: view.session == 0 and view.content.cycle != cycle.id
                ),
            ),
            with_step("push", _one_in_a_session),
            believing("session_is_ready"),
        ),
    ),
)

SERVERS = (*ORDER, *STALE_CACHE, *MEMORY, *SILENT, *NUMERIC)
