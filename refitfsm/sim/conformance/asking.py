"""Calls that only ask: health, readiness, model, server and load."""

import asyncio

from refitfsm.sim.conformance.expect import differ, expect, listing, mapping, same
from refitfsm.sim.conformance.registry import Area, check
from refitfsm.sim.conformance.subject import ENDLESS_TOKENS, Answer, Subject


@check(Area.ASKING)
async def model_info_says_what_is_served(subject: Subject) -> None:
    """The model's path, its version label and that it generates; the old name says the same."""
    answer = await subject.get("/model_info")
    same(answer.status, 200, "the status")
    for key in ("model_path", "tokenizer_path", "weight_version", "is_generation"):
        expect(key in answer.fields, f"{key} is not there")
    same(answer.fields["model_path"], subject.capabilities.model_path, "the model path")
    same(answer.fields["is_generation"], True, "is_generation")
    same(await subject.get("/get_model_info"), answer, "/get_model_info")


@check(Area.ASKING)
async def server_info_says_how_it_was_started(subject: Subject) -> None:
    """Version, ranks, memory saver, and one internal state for each data-parallel rank."""
    answer = await subject.get("/server_info")
    same(answer.status, 200, "the status")
    same(answer.fields["version"], subject.capabilities.sglang_version, "the version")
    same(answer.fields["tp_size"], subject.capabilities.tp_size, "tp_size")
    same(answer.fields["enable_memory_saver"], subject.capabilities.memory_saver, "enable_memory_saver")
    states = listing(answer.fields["internal_states"])
    same(len(states), 1, "the number of internal states")
    expect("memory_usage" in mapping(states[0]), "memory_usage is not there")


@check(Area.ASKING)
async def server_info_has_an_old_name(subject: Subject) -> None:
    """/get_server_info answers as /server_info does."""
    old, new = await subject.get("/get_server_info"), await subject.get("/server_info")
    same(old.status, 200, "the status")
    same(set(old.fields), set(new.fields), "its fields")


@check(Area.ASKING, since=(0, 5, 18))
async def only_model_info_has_the_live_version(subject: Subject) -> None:
    """From 0.5.18 on /server_info keeps the label of the start."""
    start = (await subject.get("/server_info")).fields["weight_version"]
    await subject.well("/update_weight_version", {"new_version": "live", "abort_all_requests": False})
    same((await subject.get("/model_info")).fields["weight_version"], "live", "the label in /model_info")
    same((await subject.get("/server_info")).fields["weight_version"], start, "the label in /server_info")


@check(Area.ASKING, since=(0, 5, 20))
async def ready_is_an_answer_about_pausing(subject: Subject) -> None:
    """/ready is 200 with no body, 503 while paused, and 200 again."""
    same(await subject.get("/ready"), Answer(200, ""), "/ready")
    for mode in ("abort", "in_place", "retract"):
        await subject.well("/pause_generation", {"mode": mode})
        same((await subject.get("/ready")).status, 503, f"/ready while paused in {mode}")
        await subject.well("/continue_generation", {})
        same((await subject.get("/ready")).status, 200, "/ready after that")


@check(Area.ASKING, before=(0, 5, 20))
async def ready_is_not_there_yet(subject: Subject) -> None:
    """Before 0.5.20 there is no /ready."""
    same((await subject.get("/ready")).status, 404, "/ready")


@check(Area.ASKING)
async def health_runs_a_token(subject: Subject) -> None:
    """/health of a server that serves is 200 with no body, and leaves nothing running."""
    same(await subject.get("/health"), Answer(200, ""), "/health")
    await subject.idle()


@check(Area.ASKING, slow=True)
async def health_gives_up_on_a_paused_server(subject: Subject) -> None:
    """While paused, /health is 503 after its own timeout, and 200 again after the continue."""
    await subject.well("/pause_generation", {})
    same((await subject.get("/health")).status, 503, "/health while paused")
    await subject.well("/continue_generation", {})
    same((await subject.get("/health")).status, 200, "/health after that")


@check(Area.ASKING)
async def loads_are_told_by_rank(subject: Subject) -> None:
    """/v1/loads has one load for each data-parallel rank, with what runs and what waits."""
    answer = await subject.get("/v1/loads")
    loads = listing(answer.fields["loads"])
    same(len(loads), 1, "the number of loads")
    for key in ("dp_rank", "num_running_reqs", "num_waiting_reqs", "max_total_num_tokens"):
        expect(key in mapping(loads[0]), f"{key} is not there")


@check(Area.ASKING)
async def the_old_load_is_there_until_it_is_not(subject: Subject) -> None:
    """/get_load is a list up to 0.5.20, and gone after that."""
    answer = await subject.get("/get_load")
    if subject.sessions:
        same(answer.status, 404, "/get_load")
    else:
        same(len(listing(answer.value)), 1, "the number of loads")


@check(Area.ASKING)
async def nobody_tells_the_version_at_the_old_place(subject: Subject) -> None:
    """/get_weight_version and /weight_version are a 404 in every simulated release."""
    for path in ("/get_weight_version", "/weight_version"):
        same((await subject.get(path)).status, 404, path)


@check(Area.ASKING)
async def asking_is_answered_while_paused(subject: Subject) -> None:
    """A pause holds requests, and neither /model_info nor /server_info nor /v1/loads."""
    await subject.well("/pause_generation", {})
    async with asyncio.timeout(5.0):
        for path in ("/model_info", "/server_info", "/v1/loads"):
            same((await subject.get(path)).status, 200, path)
    await subject.well("/continue_generation", {})


@check(Area.ASKING)
async def asking_is_answered_while_a_request_runs(subject: Subject) -> None:
    """A running request holds up neither /model_info nor /server_info nor the weights checker."""
    async with subject.slowly():
        request = await subject.running(ENDLESS_TOKENS)
        for path in ("/model_info", "/server_info"):
            same((await subject.get(path)).status, 200, path)
        checked = await subject.post("/weights_checker", {"action": "checksum"})
        expect("success" in checked.fields, f"the checker said {checked}")
        expect(not request.done(), "the request has ended")


@check(Area.ASKING)
async def the_label_can_be_changed(subject: Subject) -> None:
    """/update_weight_version says what it did, and the label is in /model_info and in the answers."""
    before = (await subject.generate()).meta["weight_version"]
    body = {"new_version": "another", "abort_all_requests": False}
    answer = await subject.well("/update_weight_version", body)
    wanted = {
        "success": True,
        "message": "Weight version updated to another",
        "new_version": "another",
    }
    same(answer.value, wanted, "the answer")
    same((await subject.get("/model_info")).fields["weight_version"], "another", "the label")
    after = (await subject.generate()).meta["weight_version"]
    differ(after, before, "the labels in two answers")
    same(after, "another", "the label in an answer")
