"""Giving GPU memory back and taking it again, in orders that SGLang survives."""

from refitfsm.sim.conformance.expect import differ, expect, same
from refitfsm.sim.conformance.registry import Area, Need, check
from refitfsm.sim.conformance.subject import Answer, Subject

_NULL = Answer(200, None)
_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@check(Area.MEMORY)
async def a_release_of_the_cache_flushes_it(subject: Subject) -> None:
    """Release and resume of the cache answer null, keep the weights, and empty the cache."""
    before = await subject.tokens()
    await subject.settled()
    same(await subject.post(_RELEASE, {"tags": ["kv_cache"]}), _NULL, "the release")
    same(await subject.post(_RESUME, {"tags": ["kv_cache"]}), _NULL, "the resume")
    after = await subject.generate()
    same(after.tokens, before, "the answer")
    same(after.meta["cached_tokens"], 0, "cached_tokens")


@check(Area.MEMORY)
async def any_name_can_be_released(subject: Subject) -> None:
    """A tag that nobody knows is taken, remembered, and taken back."""
    same(await subject.post(_RELEASE, {"tags": ["nonsense"]}), _NULL, "the release")
    same(await subject.post(_RELEASE, {"tags": ["nonsense"]}), _NULL, "a second release")
    same(await subject.post(_RESUME, {"tags": ["nonsense"]}), _NULL, "the resume")
    await subject.tokens()


@check(Area.MEMORY)
async def memory_calls_take_get(subject: Subject) -> None:
    """Release and resume take GET as well as POST."""
    for path in (_RELEASE, _RESUME):
        same((await subject.reply("GET", path, {"tags": ["nonsense"]})).status, 200, path)


@check(Area.MEMORY)
async def a_flush_is_harmless_without_a_cache(subject: Subject) -> None:
    """While the cache is released a flush says 200, on a paused server."""
    await subject.quiet()
    await subject.well(_RELEASE, {"tags": ["kv_cache"]})
    same((await subject.post("/flush_cache")).status, 200, "the flush")
    await subject.well(_RESUME, {"tags": ["kv_cache"]})
    await subject.go_on()


@check(Area.MEMORY, needs=Need.NO_SAVER)
async def without_the_saver_a_release_is_bookkeeping(subject: Subject) -> None:
    """Without the memory saver a released server answers as before, and may be released again."""
    before = await subject.tokens()
    await subject.idle()
    for _ in range(2):
        same(await subject.post(_RELEASE, {}), _NULL, "the release")
    same(await subject.tokens(), before, "the answer while released")
    same(await subject.post(_RESUME, {}), _NULL, "the resume")
    same(await subject.tokens(), before, "the answer")


@check(Area.MEMORY, needs=Need.SAVER)
async def released_weights_are_gone(subject: Subject) -> None:
    """After release and resume without a push, requests and /health are answered 200, with other tokens."""
    before = await subject.tokens()
    await subject.quiet()
    await subject.well(_RELEASE, {"tags": ["weights"]})
    await subject.well(_RESUME, {"tags": ["weights"]})
    await subject.go_on()
    differ(await subject.tokens(), before, "the answers with and without weights")
    same((await subject.get("/health")).status, 200, "/health")
    await subject.quiet()
    await subject.restore(6)
    same(await subject.tokens(), before, "the answer")


@check(Area.MEMORY, needs=Need.SAVER)
async def a_pause_fences_a_released_server(subject: Subject) -> None:
    """While paused and released, asking is answered, and what is listed as out can be taken back in parts."""
    before = await subject.tokens()
    await subject.quiet()
    await subject.well(_RELEASE, {})
    for path in ("/model_info", "/server_info", "/v1/loads"):
        same((await subject.get(path)).status, 200, path)
    same((await subject.post("/flush_cache")).status, 200, "a flush")
    await subject.resume_all()
    same(await subject.tokens(), before, "the answer")


@check(Area.MEMORY, needs=Need.SAVER)
async def weights_can_be_pushed_while_the_cache_is_out(subject: Subject) -> None:
    """A push needs the weights' memory alone."""
    before = await subject.tokens()
    await subject.quiet()
    await subject.well(_RELEASE, {"tags": ["kv_cache"]})
    await subject.push(1, 7)
    await subject.well(_RESUME, {"tags": ["kv_cache"]})
    await subject.go_on()
    differ(await subject.tokens(), before, "the answers of two sets of weights")
    await subject.quiet()
    await subject.restore(8)


@check(Area.MEMORY, since=(0, 5, 21))
async def retracted_requests_do_not_keep_new_releases_from_a_release(subject: Subject) -> None:
    """From 0.5.21 on the cache can be released over retracted requests, which go on afterwards."""
    request = await subject.running()
    await subject.well("/pause_generation", {"mode": "retract"})
    same(await subject.post(_RELEASE, {"tags": ["kv_cache"]}), _NULL, "the release")
    await subject.well(_RESUME, {"tags": ["kv_cache"]})
    expect(not request.done(), "the request has ended")
    await subject.well("/continue_generation", {})
    await request
