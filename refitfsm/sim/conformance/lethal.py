"""Calls that kill a server. Each gets a server of its own, and leaves it dead."""

import asyncio
import base64
import pickle
from collections.abc import Awaitable
from typing import Final

from refitfsm.drivers.base import Observation
from refitfsm.model.states import Tag
from refitfsm.model.values import CommandKind, EventName
from refitfsm.sim.conformance.expect import Broken, expect
from refitfsm.sim.conformance.registry import Area, Need, check
from refitfsm.sim.conformance.subject import ENDLESS_TOKENS, STEP_S, Answer, Subject, asking, zeros

_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"
_TENSORS: Final = "/update_weights_from_tensor"


async def _dies(subject: Subject, work: Awaitable[Observation]) -> None:
    """The command kills the server, and the driver sees it, or that it cannot tell while the server goes."""
    observation = await work
    expect(observation.event in (EventName.DIED, EventName.LOST), f"it ended as {observation}")
    await subject.gone()


async def _dies_of_push(subject: Subject, **body: object) -> None:
    """An update with this body kills, in a session where there are sessions."""
    await subject.quiet()
    if subject.sessions:
        await subject.well("/begin_weight_update", {})
    await subject.dies_of("POST", _TENSORS, {"flush_cache": False, **body})


async def _endless(subject: Subject) -> "asyncio.Task[Answer]":
    await subject.well("/slow_down", {"forward_sleep_time": STEP_S})
    return await subject.running(ENDLESS_TOKENS)


async def _lost(request: "asyncio.Task[Answer]") -> None:
    """The request went down with the server."""
    result = (await asyncio.gather(request, return_exceptions=True))[0]
    if not isinstance(result, Exception) or isinstance(result, Broken):
        raise Broken(f"the request was answered: {result!r:.300}")


# --- memory ---------------------------------------------------------------------------------------


@check(Area.DEATH, lethal=True)
async def a_resume_of_what_is_resident_kills(subject: Subject) -> None:
    """Resume with nothing released."""
    await _dies(subject, subject.do(CommandKind.RESUME, tags=frozenset({Tag.WEIGHTS})))


@check(Area.DEATH, lethal=True)
async def a_resume_of_everything_after_a_part_kills(subject: Subject) -> None:
    """Resume without tags means all of them, and one that is not out kills."""
    await subject.quiet()
    await subject.well(_RELEASE, {"tags": ["kv_cache"]})
    await subject.dies_of("POST", _RESUME, {})


@check(Area.DEATH, lethal=True)
async def a_resume_that_names_a_tag_twice_kills(subject: Subject) -> None:
    """The second mention finds the tag no longer out."""
    await subject.quiet()
    await subject.well(_RELEASE, {"tags": ["kv_cache"]})
    await subject.dies_of("POST", _RESUME, {"tags": ["kv_cache", "kv_cache"]})


@check(Area.DEATH, lethal=True)
async def a_release_while_a_request_runs_kills(subject: Subject) -> None:
    """Release under load, and the request is lost with the server."""
    request = await _endless(subject)
    await _dies(subject, subject.do(CommandKind.RELEASE, tags=frozenset({Tag.KV_CACHE})))
    await _lost(request)


@check(Area.DEATH, lethal=True)
async def a_release_over_a_request_paused_in_place_kills(subject: Subject) -> None:
    """A pause in place does not make a server idle."""
    request = await _endless(subject)
    await subject.well("/pause_generation", {"mode": "in_place"})
    await subject.dies_of("POST", _RELEASE, {"tags": ["kv_cache"]})
    await _lost(request)


@check(Area.DEATH, lethal=True, before=(0, 5, 21))
async def a_release_over_retracted_requests_kills(subject: Subject) -> None:
    """Up to 0.5.20 what waits in the queue counts."""
    request = await _endless(subject)
    await subject.well("/pause_generation", {"mode": "retract"})
    await subject.dies_of("POST", _RELEASE, {"tags": ["kv_cache"]})
    await _lost(request)


@check(Area.DEATH, lethal=True, needs=Need.SAVER)
async def a_second_release_kills_with_the_memory_saver(subject: Subject) -> None:
    """Release of what is released."""
    await subject.quiet()
    await subject.ok(CommandKind.RELEASE, tags=frozenset({Tag.KV_CACHE}))
    await _dies(subject, subject.do(CommandKind.RELEASE, tags=frozenset({Tag.KV_CACHE})))


@check(Area.DEATH, lethal=True, needs=Need.SAVER)
async def a_request_to_a_released_server_kills(subject: Subject) -> None:
    """A forward pass finds no memory."""
    await subject.well(_RELEASE, {"tags": ["kv_cache", "weights"]})
    await subject.dies_of("POST", "/generate", asking())


@check(Area.DEATH, lethal=True, needs=Need.SAVER)
async def a_health_check_of_a_released_server_kills(subject: Subject) -> None:
    """A health check is a forward pass, too."""
    await subject.well(_RELEASE, {"tags": ["kv_cache", "weights"]})
    await subject.dies_of("GET", "/health")


@check(Area.DEATH, lethal=True, needs=Need.SAVER)
async def a_push_into_released_weights_kills(subject: Subject) -> None:
    """There is nowhere to write to."""
    await subject.quiet()
    await subject.well(_RELEASE, {"tags": ["weights"]})
    if subject.sessions:
        await subject.well("/begin_weight_update", {})
    spec = subject.source(0).manifest.tensors[-1]
    entries = subject.entries(zeros((spec.name, spec.shape)))
    await subject.dies_of("POST", _TENSORS, {"serialized_named_tensors": entries})


# --- payloads -------------------------------------------------------------------------------------


@check(Area.DEATH, lethal=True)
async def a_push_of_a_wrong_shape_kills(subject: Subject) -> None:
    """A known tensor of another shape."""
    name = subject.source(0).manifest.tensors[-1].name
    await _dies_of_push(subject, serialized_named_tensors=subject.entries(zeros((name, (3,)))))


@check(Area.DEATH, lethal=True)
async def a_short_list_of_payloads_kills(subject: Subject) -> None:
    """Fewer payloads than tensor parallel ranks."""
    await _dies_of_push(subject, serialized_named_tensors=[])


@check(Area.DEATH, lethal=True)
async def a_payload_that_is_no_pickle_kills(subject: Subject) -> None:
    """Base64 of something else."""
    garbage = base64.b64encode(b"garbage bytes that are no pickle").decode()
    await _dies_of_push(subject, serialized_named_tensors=subject.entries(garbage))


@check(Area.DEATH, lethal=True)
async def a_payload_off_the_allow_list_kills(subject: Subject) -> None:
    """A pickle that names a function SGLang does not allow."""
    entry = base64.b64encode(pickle.dumps(base64.b64decode, protocol=4)).decode()
    await _dies_of_push(subject, serialized_named_tensors=subject.entries(entry))


@check(Area.DEATH, lethal=True)
async def an_unknown_load_format_kills(subject: Subject) -> None:
    """A load format that nobody implements."""
    entries = subject.entries(zeros(("model.nope.weight", (2,))))
    await _dies_of_push(subject, serialized_named_tensors=entries, load_format="bogus")


@check(Area.DEATH, lethal=True)
async def an_unknown_name_in_a_direct_load_kills(subject: Subject) -> None:
    """With load_format direct, a name that is not there is not passed over."""
    entries = subject.entries(zeros(("model.nope.weight", (2,))))
    await _dies_of_push(subject, serialized_named_tensors=entries, load_format="direct")


@check(Area.DEATH, lethal=True, before=(0, 5, 22))
async def an_update_whose_flush_is_refused_kills(subject: Subject) -> None:
    """Up to 0.5.21 an update that cannot flush because a request runs is the end."""
    if subject.sessions:
        await subject.well("/begin_weight_update", {})
    request = await _endless(subject)
    await subject.well("/pause_generation", {"mode": "in_place"})
    body = subject.update(zeros(("model.nope.weight", (2,))), flush_cache=True)
    await subject.dies_of("POST", _TENSORS, body)
    await _lost(request)


@check(Area.DEATH, lethal=True, before=(0, 5, 21))
async def a_distributed_update_for_an_unknown_group_kills(subject: Subject) -> None:
    """Up to 0.5.20 the group must have been joined."""
    body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "nobody"}
    await subject.dies_of("POST", "/update_weights_from_distributed", body)


@check(Area.DEATH, lethal=True)
async def an_empty_prompt_in_a_batch_kills(subject: Subject) -> None:
    """An empty prompt is refused where it stands alone, and not where it stands in a list."""
    await subject.dies_of("POST", "/generate", asking(input_ids=[[]]))


@check(Area.DEATH, lethal=True)
async def a_token_outside_the_vocabulary_kills(subject: Subject) -> None:
    """Nobody looks whether a token id has an embedding."""
    await subject.dies_of("POST", "/generate", asking(input_ids=[1 << 24]))
