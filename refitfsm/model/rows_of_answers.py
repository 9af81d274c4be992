"""The rows for answers: what a server's view becomes when a command has ended, or the server has."""

from refitfsm.model.row import (
    EVERYWHERE,
    OFFLINE,
    ONLINE,
    PAUSABLE,
    REBUILT,
    RELEASED,
    SERVING,
    STAGED,
    Row,
    ignore,
    take,
)
from refitfsm.model.values import REQUESTS
from refitfsm.model.values import EventName as E

_EXPECTED = ("answer_is_expected",)
_OK = ("settle",)

ROWS: tuple[Row, ...] = (
    *take(
        OFFLINE,
        E.ENROLLED,
        (*_EXPECTED, "server_is_unowned"),
        ("note_enrolment",),
        "A fresh server: resident, start-up weights, its gate closed.",
        SERVING,
    ),
    *take(OFFLINE, E.ENROLLED, _EXPECTED, ("drop_command",), "A paused server belongs to somebody else."),
    *take(SERVING, E.DRAINED, _EXPECTED, ("close_gate", *_OK), "What still runs is aborted by the pause."),
    *take(
        (SERVING, STAGED),
        E.PAUSED,
        _EXPECTED,
        ("note_pause", *_OK),
        "Strangers' requests wait from here on.",
    ),
    *take(
        REBUILT,
        E.PAUSED,
        (*_EXPECTED, "cache_is_empty"),
        ("note_pause", *_OK),
        "Paused, and the cache still empty.",
    ),
    *take(
        REBUILT,
        E.PAUSED,
        _EXPECTED,
        ("note_pause", *_OK),
        "It may have gone on meanwhile: its cache has to be confirmed empty once more.",
        STAGED,
    ),
    *take(
        STAGED,
        E.FLUSHED,
        (*_EXPECTED, "everything_is_resident", "content_is_proved", "session_is_closed"),
        ("empty_cache", *_OK),
        "Everything is resident, proved and clean: ready for the fleet's commit.",
        REBUILT,
    ),
    *take(PAUSABLE, E.FLUSHED, _EXPECTED, ("empty_cache", *_OK), "The cache is empty and the server idle."),
    *take(
        PAUSABLE,
        E.RELEASED,
        _EXPECTED,
        ("note_release", *_OK),
        "The memory is out; weights without a backup are gone.",
        RELEASED,
    ),
    *take(
        RELEASED, E.RESUMED, _EXPECTED, ("note_resume", *_OK), "Weights are resident; not yet right.", STAGED
    ),
    *take(STAGED, E.RESUMED, _EXPECTED, ("note_resume", *_OK), "The rest is resident."),
    *take(ONLINE, E.BEGUN, _EXPECTED, ("note_session", *_OK), "The weights are no longer whole.", STAGED),
    *take(
        ONLINE,
        E.PUSHED,
        (*_EXPECTED, "chunk_is_last"),
        ("note_chunk", "complete_content", *_OK),
        "The whole model is in, not yet proved.",
        STAGED,
    ),
    *take(ONLINE, E.PUSHED, _EXPECTED, ("note_chunk", *_OK), "One more chunk is in.", STAGED),
    *take(STAGED, E.ENDED, _EXPECTED, ("note_session_end", *_OK), "The session is closed."),
    *take(
        STAGED,
        E.VERIFIED,
        (*_EXPECTED, "version_is_the_one_pushed"),
        ("note_proof", *_OK),
        "What the server has is what was pushed.",
    ),
    *take(
        STAGED,
        E.VERIFIED,
        _EXPECTED,
        ("spoil_content", "quarantine", "drop_command"),
        "The server reports another version than was pushed: somebody else wrote to it, or the push did not.",
    ),
    *take(
        (SERVING, REBUILT),
        E.CONTINUED,
        _EXPECTED,
        ("open_gate", *_OK),
        "The server serves the fleet's version.",
        SERVING,
    ),
    *take(
        ONLINE,
        E.REFUSED,
        (*_EXPECTED, "refusal_is_of_an_open_session", "cycle_has_not_written"),
        ("note_foreign_session", *_OK),
        "A session was left open by somebody who is gone: it is ended, then ours begins.",
        STAGED,
    ),
    *take(
        STAGED,
        E.REFUSED,
        (*_EXPECTED, "refusal_is_of_a_closed_session"),
        ("note_session_end", "spoil_content", *_OK),
        "Somebody ended it before us, and what else they did is not known: the weights are pushed anew.",
    ),
    *take(EVERYWHERE, E.REFUSED, _EXPECTED, ("drop_command",), "Nothing changed; the cycle decides."),
    *take(
        ONLINE,
        E.FAILED,
        (*_EXPECTED, "command_moves_weights"),
        ("spoil_content", "quarantine", "drop_command"),
        "The weights may be mixed: only a full push or a restart leads out.",
        STAGED,
    ),
    *take(
        (SERVING, REBUILT),
        E.FAILED,
        (*_EXPECTED, "command_moves_memory"),
        ("forget_residency", "suspect", "drop_command"),
        "What is resident is not known any more. It counts as released.",
        RELEASED,
    ),
    *take(
        (RELEASED, STAGED),
        E.FAILED,
        (*_EXPECTED, "command_moves_memory"),
        ("forget_residency", "suspect", "drop_command"),
        "What is resident is not known any more.",
    ),
    *take(EVERYWHERE, E.FAILED, _EXPECTED, ("drop_command",), "Nothing changed; the cycle decides."),
    *take(
        ONLINE,
        E.LOST,
        (*_EXPECTED, "command_moves_weights"),
        ("spoil_content", "suspect", "drop_command"),
        "The write may still happen: the server is not used again before a restart.",
        STAGED,
    ),
    *take(
        (SERVING, REBUILT),
        E.LOST,
        (*_EXPECTED, "command_moves_memory"),
        ("forget_residency", "suspect", "drop_command"),
        "SGLang cannot be asked what is released: evidence or a restart must tell. It counts as released.",
        RELEASED,
    ),
    *take(
        (RELEASED, STAGED),
        E.LOST,
        (*_EXPECTED, "command_moves_memory"),
        ("forget_residency", "suspect", "drop_command"),
        "SGLang cannot be asked what is released: evidence or a restart must tell.",
    ),
    *take(EVERYWHERE, E.LOST, _EXPECTED, ("drop_command",), "The command may be repeated."),
    *take(EVERYWHERE, E.DIED, (), ("take_offline",), "The process is gone.", OFFLINE),
    *take(
        (STAGED, REBUILT),
        E.UNCOMMITTED,
        ("server_is_trusted", "cycle_has_written"),
        ("quarantine", "note_reason"),
        "It holds weights that the fleet did not commit: a proved full push, or a restart, leads out.",
    ),
    *(
        row
        for event in E
        if event not in REQUESTS and event is not E.DIED
        for row in ignore(EVERYWHERE, event, "It changes nothing here, and is recorded.")
    ),
)
