"""The calls that steer a server: memory, cache, pausing and versions."""

from typing import Final

from refitfsm.sim.bodies import Abort, Empty, Memory, NewVersion, Pause, SlowDown, decode
from refitfsm.sim.engine import Engine
from refitfsm.sim.wire import (
    NULL,
    HttpReply,
    HttpRequest,
    empty_reply,
    invalid_body,
    json_reply,
    outcome,
    text_reply,
)

_FLUSHED: Final = text_reply(
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_PAUSED: Final = json_reply({"message": "Generation paused successfully.", "status": "ok"})
_CONTINUED: Final = json_reply({"message": "Generation continued successfully.", "status": "ok"})
_EMPTY: Final = empty_reply()


async def release(engine: Engine, request: HttpRequest) -> HttpReply:
    """/release_memory_occupation: `null`, or the server dies."""
    body = decode(request, Memory)
    if isinstance(body, HttpReply):
        return body
    await engine.release(body.tags)
    return NULL


async def resume(engine: Engine, request: HttpRequest) -> HttpReply:
    """/resume_memory_occupation: `null`, or the server dies."""
    body = decode(request, Memory)
    if isinstance(body, HttpReply):
        return body
    await engine.resume(body.tags)
    return NULL


async def flush(engine: Engine, request: HttpRequest) -> HttpReply:
    """/flush_cache: 200, or 400 while the scheduler is busy. Needs no body."""
    timeout_s = 0.0
    if "timeout" in request.query:
        try:
            timeout_s = float(request.query["timeout"])
        except ValueError:
            return invalid_body("float_parsing", ("query", "timeout"), "Input should be a valid number")
        if not timeout_s >= 0:
            return invalid_body("greater_than_equal", ("query", "timeout"), "Input should be >= 0")
    flushed, message = await engine.flush(timeout_s)
    return _FLUSHED if flushed else text_reply(message, 400)


async def pause(engine: Engine, request: HttpRequest) -> HttpReply:
    """/pause_generation."""
    body = decode(request, Pause)
    if isinstance(body, HttpReply):
        return body
    await engine.pause(body.mode)
    return _PAUSED


async def go_on(engine: Engine, request: HttpRequest) -> HttpReply:
    """/continue_generation."""
    body = decode(request, Empty)
    if isinstance(body, HttpReply):
        return body
    await engine.go_on()
    return _CONTINUED


async def abort(engine: Engine, request: HttpRequest) -> HttpReply:
    """/abort_request: always 200 and at once. An id that nobody has is ignored, a known one is a prefix."""
    body = decode(request, Abort)
    if isinstance(body, HttpReply):
        return body
    if body.abort_all:
        engine.scheduler.abort_all()
    elif body.rid in engine.truth.running or body.rid in engine.truth.waiting:
        engine.scheduler.abort_all(body.rid)
    return _EMPTY


async def new_version(engine: Engine, request: HttpRequest) -> HttpReply:
    """/update_weight_version: aborts everything unless told not to."""
    body = decode(request, NewVersion)
    if isinstance(body, HttpReply):
        return body
    if body.abort_all_requests:
        engine.scheduler.abort_all()
    version = body.new_version

    def act() -> None:
        engine.truth.version_scheduler = version

    if engine.profile.version_spans:
        await engine.scheduler.change("version", engine.config.timings.control_s, act)
    engine.truth.version_front = version
    return outcome(True, f"Weight version updated to {version}", new_version=version)


async def slow_down(engine: Engine, request: HttpRequest) -> HttpReply:
    """/slow_down: from now on each step takes this much longer."""
    body = decode(request, SlowDown)
    if isinstance(body, HttpReply):
        return body
    seconds = body.forward_sleep_time or 0.0

    def act() -> None:
        engine.scheduler.extra_step_s = seconds

    await engine.scheduler.change("slow_down", engine.config.timings.control_s, act)
    return NULL
