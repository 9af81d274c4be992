"""Carries one call to a simulated server through whatever fault befalls it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from refitfsm.drivers.transport import AnswerLost, NotSent
from refitfsm.sim.faults import Fault, Kind
from refitfsm.sim.server import SimServer
from refitfsm.sim.wire import NULL, HttpReply, HttpRequest, json_reply, text_reply

Response = HttpReply | AsyncGenerator[bytes, None]

_GARBLED: Final = HttpReply(200, b'{"success": tru')
_LIES: Final[dict[str, HttpReply]] = {
    "/release_memory_occupation": NULL,
    "/resume_memory_occupation": NULL,
    "/flush_cache": text_reply("Cache flushed.\n"),
    "/pause_generation": json_reply({"message": "Generation paused successfully.", "status": "ok"}),
    "/continue_generation": json_reply({"message": "Generation continued successfully.", "status": "ok"}),
}
_BEFORE: Final = frozenset(
    {
        Kind.REFUSE,
        Kind.LOSE_REQUEST,
        Kind.STATUS_BEFORE,
        Kind.SUCCESS_FALSE,
        Kind.LIE,
        Kind.HANG_BEFORE,
        Kind.KILL,
    }
)
"""The call never reaches the server."""
_UNHEARD: Final = frozenset(
    {Kind.LOSE_ANSWER, Kind.STATUS_AFTER, Kind.GARBLE, Kind.HANG_AFTER, Kind.KILL_AFTER}
)
"""The call is applied, and the client never hears what the server said."""


async def deliver(server: SimServer, request: HttpRequest, fault: Fault | None) -> Response:
    """The server's answer, or what the fault makes of it.

    Raises:
        NotSent: nothing listens, or the fault says so.
        AnswerLost: the connection broke.
    """
    if fault is None:
        return await server.respond(request)
    if fault.kind in _BEFORE:
        return await _instead(server, request, fault)
    if fault.kind is Kind.SLOW:
        await asyncio.sleep(fault.argument)
    reply = await server.respond(request)
    return await _afterwards(server, request, fault, reply)


async def _instead(server: SimServer, request: HttpRequest, fault: Fault) -> Response:
    match fault.kind:
        case Kind.REFUSE:
            raise NotSent(f"{server.name}: the connection is refused by a fault")
        case Kind.LOSE_REQUEST:
            raise AnswerLost(f"{server.name}: the request is lost by a fault")
        case Kind.HANG_BEFORE:
            await _for_ever()
        case Kind.KILL:
            server.kill(f"fault at {request.path}")
            raise AnswerLost(f"{server.name}: killed by a fault")
        case Kind.LIE:
            return _LIES.get(request.path, json_reply({"success": True, "message": "Success"}))
        case Kind.SUCCESS_FALSE:
            return json_reply({"success": False, "message": "refused by a fault"}, int(fault.argument))
    return text_reply("", int(fault.argument))


async def _afterwards(server: SimServer, request: HttpRequest, fault: Fault, reply: Response) -> Response:
    if fault.kind in _UNHEARD and not isinstance(reply, HttpReply):
        await anext(reply, None)  # a streamed job begins with its first event
        await reply.aclose()
    match fault.kind:
        case Kind.LOSE_ANSWER:
            raise AnswerLost(f"{server.name}: the answer is lost by a fault")
        case Kind.DELAY:
            await asyncio.sleep(fault.argument)
        case Kind.DUPLICATE:
            await server.respond(request)
        case Kind.STATUS_AFTER:
            return text_reply("", int(fault.argument))
        case Kind.GARBLE:
            return _GARBLED
        case Kind.CORRUPT:
            server.truth.weights.scramble(server.truth.weights.names()[0], "corrupt")
        case Kind.HANG_AFTER:
            await _for_ever()
        case Kind.KILL_AFTER:
            server.kill(f"fault after {request.path}")
            raise AnswerLost(f"{server.name}: killed by a fault")
    return reply


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()
