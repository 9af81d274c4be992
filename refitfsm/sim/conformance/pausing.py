"""Pausing, going on, aborting and flushing, with requests in flight."""

import asyncio
from typing import Final

from refitfsm.sim.conformance.expect import expect, same
from refitfsm.sim.conformance.registry import Area, check
from refitfsm.sim.conformance.subject import ENDLESS_TOKENS, LONG_TOKENS, Answer, Subject

_PAUSED: Final = {"message": "Generation paused successfully.", "status": "ok"}
_CONTINUED: Final = {"message": "Generation continued successfully.", "status": "ok"}


@check(Area.PAUSING)
async def pauses_and_continues_say_so(subject: Subject) -> None:
    """Each pause, also on top of another, and each continue, also of what runs, answer in fixed words."""
    for mode in ("abort", "in_place", "retract", "abort"):
        same((await subject.well("/pause_generation", {"mode": mode})).value, _PAUSED, mode)
    for _ in range(2):
        same((await subject.well("/continue_generation", {})).value, _CONTINUED, "continue")


@check(Area.PAUSING)
async def every_mode_of_pause_holds_new_requests(subject: Subject) -> None:
    """A request that comes after a pause waits for the continue, whatever the mode."""
    before = await subject.tokens()
    for mode in ("abort", "in_place", "retract"):
        await subject.well("/pause_generation", {"mode": mode})
        request = asyncio.create_task(subject.generate())
        await subject.held(request)
        await subject.well("/continue_generation", {})
        same((await request).tokens, before, f"the answer after {mode}")


@check(Area.PAUSING)
async def a_pause_in_place_is_only_a_wait(subject: Subject) -> None:
    """A request paused in place goes on with the continue and ends with all its tokens."""
    whole = (await subject.generate(LONG_TOKENS)).tokens
    request = await subject.running()
    await subject.well("/pause_generation", {"mode": "in_place"})
    await subject.held(request)
    await subject.well("/continue_generation", {})
    answer = await request
    same(answer.tokens, whole, "the tokens")
    same(answer.meta["num_retractions"], 0, "num_retractions")


@check(Area.PAUSING)
async def a_retracted_request_begins_anew(subject: Subject) -> None:
    """A retracted request keeps its tokens, is computed again, and says that it was retracted."""
    request = await subject.running()
    await subject.well("/pause_generation", {"mode": "retract"})
    await subject.held(request)
    await subject.well("/continue_generation", {})
    answer = await request
    same(len(answer.tokens), LONG_TOKENS, "the number of tokens")
    same(answer.meta["num_retractions"], 1, "num_retractions")


@check(Area.PAUSING)
async def a_flush_counts_what_is_paused_in_place(subject: Subject) -> None:
    """A request that is paused in place still runs, as far as a flush is concerned."""
    request = await subject.running()
    await subject.well("/pause_generation", {"mode": "in_place"})
    same(await subject.post("/flush_cache"), Answer(400, "Flush cache failed.\n"), "the flush")
    await subject.well("/continue_generation", {})
    await request


@check(Area.PAUSING)
async def a_flush_counts_what_is_retracted_in_old_releases(subject: Subject) -> None:
    """A flush over retracted requests is refused up to 0.5.20, and done from 0.5.21 on."""
    request = await subject.running()
    await subject.well("/pause_generation", {"mode": "retract"})
    same((await subject.post("/flush_cache")).status, 200 if subject.sessions else 400, "the flush")
    await subject.well("/continue_generation", {})
    await request


@check(Area.PAUSING, since=(0, 5, 21))
async def a_flush_that_waits_counts_what_is_retracted(subject: Subject) -> None:
    """With a timeout a flush waits for the queue too, so it times out where one without is done."""
    request = await subject.running()
    await subject.well("/pause_generation", {"mode": "retract"})
    answer = await subject.post("/flush_cache?timeout=0.2")
    same(answer, Answer(400, "Timed out waiting for idle state."), "the flush")
    await subject.well("/continue_generation", {})
    await request


@check(Area.PAUSING)
async def a_flush_may_wait_for_idleness(subject: Subject) -> None:
    """With a timeout a flush waits for the running request, and is done after it."""
    request = await subject.running()
    same((await subject.post("/flush_cache?timeout=60")).status, 200, "the flush")
    async with asyncio.timeout(5.0):
        await request


@check(Area.PAUSING)
async def a_flush_waits_no_longer_than_told(subject: Subject) -> None:
    """A flush whose timeout passes is refused in other words than one that does not wait."""
    async with subject.slowly():
        request = await subject.running(ENDLESS_TOKENS)
        same(await subject.post("/flush_cache"), Answer(400, "Flush cache failed.\n"), "the flush")
        answer = await subject.post("/flush_cache?timeout=0.2")
        same(answer, Answer(400, "Timed out waiting for idle state."), "the flush that waits")
        expect(not request.done(), "the request has ended")


@check(Area.PAUSING)
async def an_abort_ends_the_requests_whose_id_begins_so(subject: Subject) -> None:
    """An id that somebody has ends all whose id begins with it; the answer is 200 with no body."""
    async with subject.slowly():
        first = await subject.running(ENDLESS_TOKENS, rid="left")
        longer = asyncio.create_task(subject.generate(ENDLESS_TOKENS, rid="left-2"))
        other = asyncio.create_task(subject.generate(ENDLESS_TOKENS, rid="right"))
        await subject.held(other)
        same(await subject.post("/abort_request", {"rid": "left"}), Answer(200, ""), "the abort")
        same((await first).finish, "abort", "the finish reason")
        same((await longer).finish, "abort", "the finish reason of the longer id")
        await subject.held(other)
    same((await other).finish, "abort", "the other's finish reason")


@check(Area.PAUSING)
async def an_abort_by_the_beginning_of_an_id_is_ignored(subject: Subject) -> None:
    """An id that nobody has ends nothing, though one begins with it."""
    async with subject.slowly():
        request = await subject.running(ENDLESS_TOKENS, rid="left-1")
        same(await subject.post("/abort_request", {"rid": "left"}), Answer(200, ""), "the abort")
        await subject.held(request)
    same((await request).finish, "abort", "the finish reason")


@check(Area.PAUSING)
async def an_abort_of_nobody_is_harmless(subject: Subject) -> None:
    """Aborting an unknown id, no id, or everything while nothing runs is answered with 200."""
    for body in ({"rid": "nobody"}, {"rid": ""}, {}, {"abort_all": True}):
        same(await subject.post("/abort_request", body), Answer(200, ""), f"the abort {body}")
    await subject.tokens()


@check(Area.PAUSING)
async def aborted_requests_are_answered(subject: Subject) -> None:
    """Aborting everything ends a running request with 200, the reason abort, and its tokens so far."""
    async with subject.slowly():
        request = await subject.running(ENDLESS_TOKENS)
        await subject.well("/abort_request", {"abort_all": True})
        answer = await request
    same(answer.finish, "abort", "the finish reason")
    expect(len(answer.tokens) < ENDLESS_TOKENS, "it has all its tokens")


@check(Area.PAUSING)
async def a_new_label_aborts_unless_told_not_to(subject: Subject) -> None:
    """/update_weight_version leaves requests alone only where it is told to."""
    async with subject.slowly():
        request = await subject.running(ENDLESS_TOKENS)
        await subject.well("/update_weight_version", {"new_version": "a", "abort_all_requests": False})
        await subject.held(request)
        await subject.well("/update_weight_version", {"new_version": "b"})
        same((await request).finish, "abort", "the finish reason")


@check(Area.PAUSING)
async def an_abort_waits_for_what_is_paused_in_place(subject: Subject) -> None:
    """A request that is paused in place is aborted at its next step, which comes with the continue."""
    async with subject.slowly():
        request = await subject.running(ENDLESS_TOKENS)
        await subject.well("/pause_generation", {"mode": "in_place"})
        await subject.well("/abort_request", {"abort_all": True})
        await subject.held(request)
        await subject.well("/continue_generation", {})
        same((await request).finish, "abort", "the finish reason")


@check(Area.PAUSING)
async def an_abort_ends_what_is_retracted_at_once(subject: Subject) -> None:
    """A retracted request waits in the queue, and is aborted there."""
    async with subject.slowly():
        request = await subject.running(ENDLESS_TOKENS)
        await subject.well("/pause_generation", {"mode": "retract"})
        await subject.held(request)
        await subject.well("/abort_request", {"abort_all": True})
        async with asyncio.timeout(10.0):
            same((await request).finish, "abort", "the finish reason")


@check(Area.PAUSING)
async def a_slower_step_is_slower(subject: Subject) -> None:
    """/slow_down answers null, and what runs goes on until it is aborted."""
    answer = await subject.well("/slow_down", {"forward_sleep_time": 0.03})
    same(answer.value, None, "the answer")
    request = await subject.running(ENDLESS_TOKENS)
    await subject.held(request)
    await subject.well("/slow_down", {"forward_sleep_time": None})
    await subject.well("/abort_request", {"abort_all": True})
    await request
    await subject.idle()
