"""The rows for requests: what may be asked of a server, and when."""

from refitfsm.model.row import (
    OFFLINE,
    ONLINE,
    PAUSABLE,
    REBUILT,
    RELEASED,
    SERVING,
    STAGED,
    Row,
    refuse,
    take,
)
from refitfsm.model.values import REQUESTS
from refitfsm.model.values import EventName as E

_FREE = ("nothing_is_pending", "server_is_trusted")
_QUIET = (*_FREE, "gate_is_closed", "server_is_paused")
_INTO = (*_QUIET, "cache_is_empty", "weights_are_resident")
_SEND = ("note_command",)

ROWS: tuple[Row, ...] = (
    *take(OFFLINE, E.ENROL, ("nothing_is_pending",), _SEND, "Ask a server who it is."),
    *refuse(ONLINE, E.ENROL, "server_is_offline", "it is enrolled already: nothing is left to do"),
    *take(
        SERVING,
        E.DRAIN,
        (*_FREE, "gate_is_not_closed"),
        ("start_draining", *_SEND),
        "Close the gate and wait for the requests in flight.",
    ),
    *refuse((RELEASED, STAGED, REBUILT), E.DRAIN, "server_is_serving", "its gate is closed already"),
    *take(
        PAUSABLE, E.PAUSE, (*_FREE, "gate_is_closed"), _SEND, "Pause generation before anything is touched."
    ),
    *refuse(RELEASED, E.PAUSE, "memory_is_resident", "it was paused before its memory was released"),
    *take(
        PAUSABLE,
        E.FLUSH,
        (*_QUIET, "cache_is_resident"),
        _SEND,
        "Empty the cache; an accepted flush also proves that the server is idle.",
    ),
    *refuse(RELEASED, E.FLUSH, "cache_is_resident", "its cache was emptied before its memory was released"),
    *take(
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
        _SEND,
        "Give GPU memory to the trainer. Only ever from a paused server that proved itself idle.",
    ),
    *refuse(
        RELEASED, E.RELEASE, "memory_is_resident", "it is released already: SGLang exits when asked twice"
    ),
    *take(
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
        _SEND,
        "Take GPU memory back: the weights first, the rest once the weights are proved.",
    ),
    *refuse(
        (SERVING, REBUILT),
        E.RESUME,
        "memory_is_released",
        "everything is resident already: SGLang dies when memory is resumed that was not released",
    ),
    *take(
        ONLINE,
        E.BEGIN,
        (*_INTO, "server_has_sessions", "session_is_closed"),
        _SEND,
        "Open the session that SGLang 0.5.21 and later want around weight updates.",
    ),
    *take(
        ONLINE,
        E.PUSH,
        (*_INTO, "session_is_ready", "version_is_newer", "chunk_is_next"),
        _SEND,
        "Send one chunk of the new weights.",
    ),
    *take(
        STAGED,
        E.END,
        (*_QUIET, "weights_are_resident", "session_is_open"),
        _SEND,
        "Close the session; SGLang rebuilds what it derives from the weights.",
    ),
    *refuse((SERVING, RELEASED, REBUILT), E.END, "session_is_open", "no session is open here"),
    *take(
        STAGED,
        E.VERIFY,
        (*_QUIET, "weights_are_resident", "session_is_closed", "content_is_complete"),
        _SEND,
        "Read back what the server has.",
    ),
    *refuse(
        (SERVING, RELEASED, REBUILT),
        E.VERIFY,
        "weights_are_staged",
        "nothing was pushed that is not verified",
    ),
    *take(
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
        ("expect_traffic", *_SEND),
        "Go on, after the fleet's commit: with the fleet's version, and no cache of any other.",
    ),
    *refuse(
        (RELEASED, STAGED),
        E.CONTINUE,
        "cache_is_rebuilt",
        "finish the cycle: a request would run on memory that is not there or weights that are not whole",
    ),
    *(
        row
        for event in REQUESTS
        if event is not E.ENROL
        for row in refuse(OFFLINE, event, "server_is_online", "start the server and enrol it")
    ),
)
