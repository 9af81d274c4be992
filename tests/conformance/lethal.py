"""Calls that kill a server, as checks. Each gets a server of its own, and leaves it dead."""

import asyncio
import base64
import pickle
from collections.abc import Awaitable

from refitfsm.drivers.base import Observation, ServerGone
from refitfsm.drivers.transport import AnswerLost, NotSent, Unreachable
from refitfsm.errors import RequestFailed
from refitfsm.model.states import Tag
from refitfsm.model.values import CommandKind, EventName
from tests.conformance.checks import Check
from tests.conformance.subject import POLL_S, WAIT_S, Subject, one_tensor

LETHAL: list[Check] = []


def lethal(function: Check) -> Check:
    LETHAL.append(function)
    return function


async def _push(subject: Subject, body: object) -> Observation:
    """A push of a body that is no push, in a session where there are sessions."""
    await subject.quiet()
    if subject.capabilities.sessions:
        await subject.ok(CommandKind.BEGIN)
    try:
        reply = await subject.post("/update_weights_from_tensor", body)
    except AnswerLost as error:
        return Observation(EventName.DIED, str(error))
    return Observation(EventName.FAILED, f"{reply}")


async def _dies(subject: Subject, work: Awaitable[Observation]) -> None:
    """The command kills the server, and the driver sees it, or that it cannot tell while the server goes."""
    observation = await work
    assert observation.event in (EventName.DIED, EventName.LOST), observation
    async with asyncio.timeout(WAIT_S):
        while not await _is_gone(subject):  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(POLL_S)


async def _is_gone(subject: Subject) -> bool:
    """Whether nobody listens. A process that is being killed may still take a connection, and drop it."""
    try:
        reply = await subject.transport.request("GET", "/model_info")
    except NotSent:
        return True
    except (AnswerLost, Unreachable):
        return False
    raise AssertionError(f"the server still answers: {reply.status}")


@lethal
async def a_resume_of_what_is_resident_kills(subject: Subject) -> None:
    """Resume with nothing released."""
    await subject.enrol()
    await _dies(subject, subject.do(CommandKind.RESUME, tags=frozenset({Tag.WEIGHTS})))


@lethal
async def a_release_while_a_request_runs_kills(subject: Subject) -> None:
    """Release under load, and the request is lost with the server."""
    await subject.enrol()
    request = await subject.running()
    await _dies(subject, subject.do(CommandKind.RELEASE, tags=frozenset({Tag.KV_CACHE})))
    result = (await asyncio.gather(request, return_exceptions=True))[0]
    assert isinstance(result, ServerGone | RequestFailed), result


@lethal
async def a_push_of_a_wrong_shape_kills(subject: Subject) -> None:
    """A known tensor of another shape."""
    await subject.enrol()
    name = subject.source(0).manifest.tensors[-1].name
    await _dies(subject, _push(subject, one_tensor(subject, name, (3,))))


@lethal
async def a_short_list_of_payloads_kills(subject: Subject) -> None:
    """Fewer payloads than tensor parallel ranks."""
    await subject.enrol()
    await _dies(subject, _push(subject, {"serialized_named_tensors": []}))


@lethal
async def a_payload_off_the_allow_list_kills(subject: Subject) -> None:
    """A pickle that names a function SGLang does not allow."""
    await subject.enrol()
    entry = base64.b64encode(pickle.dumps(base64.b64decode, protocol=4)).decode()
    await _dies(subject, _push(subject, {"serialized_named_tensors": [entry] * subject.capabilities.tp_size}))


@lethal
async def a_second_release_kills_with_the_memory_saver(subject: Subject) -> None:
    """Release of what is released."""
    await subject.enrol()
    await subject.quiet()
    await subject.ok(CommandKind.RELEASE, tags=frozenset({Tag.KV_CACHE}))
    await _dies(subject, subject.do(CommandKind.RELEASE, tags=frozenset({Tag.KV_CACHE})))
