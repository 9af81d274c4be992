"""The transition table of one server: the rules, as data.

Every (state, event) pair has a cell: an ordered tuple of rows, of which the first whose guards all
hold is taken. A cell that can run out of rows ends in an explicit refusal or an explicit ignore. The
`transitions` machine, the planner's lookup, the documentation and the diagram are made from these
rows; nothing else in the package knows which step is legal.
"""

from enum import StrEnum
from typing import NamedTuple

from refitfsm.model.effects import EFFECTS
from refitfsm.model.guards import GUARDS
from refitfsm.model.states import ServerState
from refitfsm.model.values import REQUESTS, EventName

OFFLINE, RELEASED, STAGED, REBUILT, SERVING = (
    ServerState.OFFLINE,
    ServerState.RELEASED,
    ServerState.WEIGHTS_STAGED,
    ServerState.KV_REBUILT,
    ServerState.SERVING,
)
ONLINE = (SERVING, RELEASED, STAGED, REBUILT)
PAUSABLE = (SERVING, STAGED, REBUILT)
EVERYWHERE = tuple(ServerState)


class Verdict(StrEnum):
    """What a row says of an event."""

    TAKE = "take"
    REFUSE = "refuse"
    """Nothing changes, nothing is sent, and whoever asked is told the rule and the remedy."""
    IGNORE = "ignore"
    """Nothing changes; recorded."""


class Row(NamedTuple):
    """One rule. `destination` None keeps the state."""

    id: str
    source: ServerState
    event: EventName
    verdict: Verdict
    guards: tuple[str, ...]
    destination: ServerState | None
    effects: tuple[str, ...]
    doc: str
    rule: str = ""
    """refuse: the rule in the form of a guard's name."""
    remedy: str = ""
    """refuse: what to do instead."""


class TableError(ValueError):
    """The table contradicts itself; raised at import."""


Sources = ServerState | tuple[ServerState, ...]
Cell = tuple[Row, ...]

_rows: list[Row] = []


def _add(sources: Sources, row: Row) -> None:
    for source in (sources,) if isinstance(sources, ServerState) else sources:
        count = sum(1 for other in _rows if (other.source, other.event) == (source, row.event))
        _rows.append(row._replace(id=f"{source}/{row.event}/{count}", source=source))


def _take(  # noqa: PLR0917 - a rule reads as a line
    sources: Sources,
    event: EventName,
    guards: tuple[str, ...],
    effects: tuple[str, ...],
    doc: str,
    to: ServerState | None = None,
) -> None:
    _add(sources, Row("", OFFLINE, event, Verdict.TAKE, guards, to, effects, doc))


def _refuse(sources: Sources, event: EventName, rule: str, remedy: str) -> None:
    _add(sources, Row("", OFFLINE, event, Verdict.REFUSE, (), None, (), remedy, rule, remedy))


def _ignore(sources: Sources, event: EventName, doc: str, effects: tuple[str, ...] = ()) -> None:
    _add(sources, Row("", OFFLINE, event, Verdict.IGNORE, (), None, effects, doc))


_FREE = ("nothing_is_pending", "server_is_trusted")
_QUIET = (*_FREE, "gate_is_closed", "server_is_paused")
_EXPECTED = ("answer_is_expected",)


def _requests() -> None:
    E = EventName  # noqa: N806 - a short name keeps a rule on a line
    send = ("note_command",)

    _take(OFFLINE, E.ENROL, ("nothing_is_pending",), send, "Ask a server who it is.")
    _refuse(ONLINE, E.ENROL, "server_is_offline", "it is enrolled already: nothing is left to do")

    _take(
        SERVING,
        E.DRAIN,
        (*_FREE, "gate_is_not_closed"),
        ("start_draining", *send),
        "Close the gate and wait for the requests in flight.",
    )
    _refuse((RELEASED, STAGED, REBUILT), E.DRAIN, "server_is_serving", "its gate is closed already")

    _take(PAUSABLE, E.PAUSE, (*_FREE, "gate_is_closed"), send, "Pause generation before anything is touched.")
    _refuse(RELEASED, E.PAUSE, "memory_is_resident", "it was paused before its memory was released")

    _take(
        PAUSABLE,
        E.FLUSH,
        (*_QUIET, "cache_is_resident"),
        send,
        "Empty the cache; an accepted flush also proves that the server is idle.",
    )
    _refuse(RELEASED, E.FLUSH, "cache_is_resident", "its cache was emptied before its memory was released")

    _take(
        PAUSABLE,
        E.RELEASE,
        (
            *_QUIET,
            "cache_is_empty",
            "session_is_closed",
            "memory_saver_is_on",
            "tags_are_named",
            "tags_are_resident",
        ),
        send,
        "Give GPU memory to the trainer. Only ever from a paused server that proved itself idle.",
    )
    _refuse(
        RELEASED, E.RELEASE, "memory_is_resident", "it is released already: SGLang exits when asked twice"
    )

    _take(
        (RELEASED, STAGED),
        E.RESUME,
        (
            *_QUIET,
            "tags_are_named",
            "tags_are_released",
            "weights_come_first",
            "content_allows_the_tags",
            "session_is_closed",
        ),
        send,
        "Take GPU memory back: the weights first, the rest once the weights are proved.",
    )
    _refuse(
        (SERVING, REBUILT),
        E.RESUME,
        "memory_is_released",
        "everything is resident already: SGLang dies when memory is resumed that was not released",
    )

    into = (*_QUIET, "cache_is_empty", "weights_are_resident")
    _take(
        ONLINE,
        E.BEGIN,
        (*into, "server_has_sessions", "session_is_closed"),
        send,
        "Open the session that SGLang 0.5.21 and later want around weight updates.",
    )
    _take(
        ONLINE,
        E.PUSH,
        (*into, "session_is_ready", "version_is_newer", "chunk_is_next"),
        send,
        "Send one chunk of the new weights.",
    )
    _take(
        STAGED,
        E.END,
        (*_QUIET, "weights_are_resident", "session_is_open"),
        send,
        "Close the session; SGLang rebuilds what it derives from the weights.",
    )
    _refuse((SERVING, RELEASED, REBUILT), E.END, "session_is_open", "no session is open here")
    _take(
        STAGED,
        E.VERIFY,
        (*_QUIET, "weights_are_resident", "session_is_closed", "content_is_complete"),
        send,
        "Read back what the server has.",
    )
    _refuse(
        (SERVING, RELEASED, REBUILT),
        E.VERIFY,
        "weights_are_staged",
        "nothing was pushed that is not verified",
    )

    _take(
        (SERVING, REBUILT),
        E.CONTINUE,
        (
            *_FREE,
            "gate_is_closed",
            "everything_is_resident",
            "session_is_closed",
            "version_is_committed",
            "cache_fits_the_weights",
        ),
        ("expect_traffic", *send),
        "Go on, after the fleet's commit: with the fleet's version, and no cache of any other.",
    )
    _refuse(
        (RELEASED, STAGED),
        E.CONTINUE,
        "cache_is_rebuilt",
        "finish the cycle: a request would run on memory that is not there or weights that are not whole",
    )

    for event in REQUESTS:
        if event is not E.ENROL:
            _refuse(OFFLINE, event, "server_is_online", "start the server and enrol it")


def _answers() -> None:
    E = EventName  # noqa: N806
    ok = ("settle",)

    _take(
        OFFLINE,
        E.ENROLLED,
        (*_EXPECTED, "server_is_unowned"),
        ("note_enrolment",),
        "A fresh server: resident, start-up weights, its gate closed.",
        SERVING,
    )
    _take(OFFLINE, E.ENROLLED, _EXPECTED, ("drop_command",), "A paused server belongs to somebody else.")
    _take(SERVING, E.DRAINED, _EXPECTED, ("close_gate", *ok), "What still runs is aborted by the pause.")
    _take(PAUSABLE, E.PAUSED, _EXPECTED, ("note_pause", *ok), "Strangers' requests wait from here on.")
    _take(
        STAGED,
        E.FLUSHED,
        (*_EXPECTED, "everything_is_resident", "content_is_proved", "session_is_closed"),
        ("empty_cache", *ok),
        "Everything is resident, proved and clean: ready for the fleet's commit.",
        REBUILT,
    )
    _take(PAUSABLE, E.FLUSHED, _EXPECTED, ("empty_cache", *ok), "The cache is empty and the server idle.")
    _take(
        PAUSABLE,
        E.RELEASED,
        _EXPECTED,
        ("note_release", *ok),
        "The memory is out; weights without a backup are gone.",
        RELEASED,
    )
    _take(
        RELEASED, E.RESUMED, _EXPECTED, ("note_resume", *ok), "Weights are resident; not yet right.", STAGED
    )
    _take(STAGED, E.RESUMED, _EXPECTED, ("note_resume", *ok), "The rest is resident.")
    _take(ONLINE, E.BEGUN, _EXPECTED, ("note_session", *ok), "The weights are no longer whole.", STAGED)
    _take(
        ONLINE,
        E.PUSHED,
        (*_EXPECTED, "chunk_is_last"),
        ("note_chunk", "complete_content", *ok),
        "The whole model is in, not yet proved.",
        STAGED,
    )
    _take(ONLINE, E.PUSHED, _EXPECTED, ("note_chunk", *ok), "One more chunk is in.", STAGED)
    _take(STAGED, E.ENDED, _EXPECTED, ("note_session_end", *ok), "The session is closed.")
    _take(
        STAGED,
        E.VERIFIED,
        (*_EXPECTED, "version_is_the_one_pushed"),
        ("note_proof", *ok),
        "What the server has is what was pushed.",
    )
    _take(
        STAGED,
        E.VERIFIED,
        _EXPECTED,
        ("spoil_content", "quarantine", "drop_command"),
        "The server reports another version than was pushed: somebody else wrote to it, or the push did not.",
    )
    _take(
        (SERVING, REBUILT),
        E.CONTINUED,
        _EXPECTED,
        ("open_gate", *ok),
        "The server serves the fleet's version.",
        SERVING,
    )

    _take(
        ONLINE,
        E.REFUSED,
        (*_EXPECTED, "refusal_is_of_an_open_session"),
        ("note_foreign_session", *ok),
        "A session was left open by somebody who is gone: it is ended, then ours begins.",
        STAGED,
    )
    _take(EVERYWHERE, E.REFUSED, _EXPECTED, ("drop_command",), "Nothing changed; the cycle decides.")
    _take(
        ONLINE,
        E.FAILED,
        (*_EXPECTED, "command_moves_weights"),
        ("spoil_content", "quarantine", "drop_command"),
        "The weights may be mixed: only a full push or a restart leads out.",
        STAGED,
    )
    _take(
        (SERVING, REBUILT),
        E.FAILED,
        (*_EXPECTED, "command_moves_memory"),
        ("forget_residency", "suspect", "drop_command"),
        "What is resident is not known any more. It counts as released.",
        RELEASED,
    )
    _take(
        (RELEASED, STAGED),
        E.FAILED,
        (*_EXPECTED, "command_moves_memory"),
        ("forget_residency", "suspect", "drop_command"),
        "What is resident is not known any more.",
    )
    _take(EVERYWHERE, E.FAILED, _EXPECTED, ("drop_command",), "Nothing changed; the cycle decides.")
    _take(
        ONLINE,
        E.LOST,
        (*_EXPECTED, "command_moves_weights"),
        ("spoil_content", "suspect", "drop_command"),
        "The write may still happen: the server is not used again before a restart.",
        STAGED,
    )
    _take(
        (SERVING, REBUILT),
        E.LOST,
        (*_EXPECTED, "command_moves_memory"),
        ("forget_residency", "suspect", "drop_command"),
        "SGLang cannot be asked what is released: evidence or a restart must tell. It counts as released.",
        RELEASED,
    )
    _take(
        (RELEASED, STAGED),
        E.LOST,
        (*_EXPECTED, "command_moves_memory"),
        ("forget_residency", "suspect", "drop_command"),
        "SGLang cannot be asked what is released: evidence or a restart must tell.",
    )
    _take(EVERYWHERE, E.LOST, _EXPECTED, ("drop_command",), "The command may be repeated.")

    _take(EVERYWHERE, E.DIED, (), ("take_offline",), "The process is gone.", OFFLINE)

    for event in EventName:
        if event not in REQUESTS and event is not E.DIED:
            _ignore(EVERYWHERE, event, "An answer to no command in flight is recorded and dropped.")


def _checked(rows: tuple[Row, ...]) -> dict[tuple[ServerState, EventName], Cell]:
    """The rows by cell, after checking that they are sound.

    Raises:
        TableError: a name that does not exist, a cell without rows, a row that can never be taken, a
            cell of answers that can run out of rows.
    """
    cells: dict[tuple[ServerState, EventName], Cell] = {}
    for row in rows:
        for name in row.guards:
            if name not in GUARDS:
                raise TableError(f"{row.id}: there is no guard {name}")
        for name in row.effects:
            if name not in EFFECTS:
                raise TableError(f"{row.id}: there is no effect {name}")
        cells[row.source, row.event] = (*cells.get((row.source, row.event), ()), row)
    for state in ServerState:
        for event in EventName:
            _check_cell(state, event, cells.get((state, event), ()))
    return cells


def _check_cell(state: ServerState, event: EventName, cell: Cell) -> None:
    if not cell:
        raise TableError(f"{state} does not answer {event}")
    for index, row in enumerate(cell):
        shadowed = any(set(earlier.guards) <= set(row.guards) for earlier in cell[:index])
        if shadowed:
            raise TableError(f"{row.id} can never be taken: an earlier row asks for no more")
    if event not in REQUESTS and cell[-1].guards:
        raise TableError(f"{state} can run out of rows for {event}")


_requests()
_answers()

ROWS: tuple[Row, ...] = tuple(_rows)
"""The rules, in the order in which they are written."""

TABLE: dict[tuple[ServerState, EventName], Cell] = _checked(ROWS)
"""The rules by (state, event)."""
