"""Calls that write, check and read weights, on a server that has all of its memory."""

import asyncio
import struct
from typing import Final

from refitfsm.sim.conformance.expect import NotHere, differ, expect, listing, mapping, same
from refitfsm.sim.conformance.registry import Area, check
from refitfsm.sim.conformance.subject import ENDLESS_TOKENS, Answer, Subject, carried, zeros
from refitfsm.weights.manifest import TensorSpec

_OK: Final = {"success": True, "message": "Success"}
_TENSORS: Final = "/update_weights_from_tensor"


@check(Area.WEIGHTS, since=(0, 5, 21))
async def sessions_open_and_close_once(subject: Subject) -> None:
    """Begin and end say success; a second of either is a 400 that says what to do."""
    same((await subject.post("/begin_weight_update", {})), Answer(200, _OK), "begin")
    again = await subject.post("/begin_weight_update", {})
    same(again.status, 400, "a second begin")
    expect("already open" in str(again.fields["message"]), f"it said {again}")
    same((await subject.post("/end_weight_update", {})).value, _OK, "end")
    again = await subject.post("/end_weight_update", {})
    same(again.status, 400, "a second end")
    expect("no weight-update session is open" in str(again.fields["message"]), f"it said {again}")


@check(Area.WEIGHTS, since=(0, 5, 21))
async def a_session_outlives_pauses_and_releases(subject: Subject) -> None:
    """A session stays open over pause, continue, flush and a release and resume of the cache."""
    await subject.well("/begin_weight_update", {})
    await subject.well("/pause_generation", {})
    await subject.well("/release_memory_occupation", {"tags": ["kv_cache"]})
    await subject.well("/resume_memory_occupation", {"tags": ["kv_cache"]})
    await subject.well("/flush_cache")
    await subject.well("/continue_generation", {})
    same((await subject.post("/begin_weight_update", {})).status, 400, "a begin after all that")
    await subject.well("/end_weight_update", {})


@check(Area.WEIGHTS, since=(0, 5, 21))
async def a_session_lets_requests_through(subject: Subject) -> None:
    """An open session alone holds no request."""
    before = await subject.tokens()
    async with subject.session():
        same(await subject.tokens(), before, "the answer")


@check(Area.WEIGHTS, since=(0, 5, 21))
async def an_update_outside_a_session_is_not_looked_at(subject: Subject) -> None:
    """Outside a session a payload that would kill is refused in words, and so is a distributed update."""
    garbage = {"serialized_named_tensors": ["AAAA"]}
    distributed: dict[str, object] = {"names": [], "dtypes": [], "shapes": []}
    for path, body in ((_TENSORS, garbage), ("/update_weights_from_distributed", distributed)):
        answer = await subject.post(path, body)
        same(answer.status, 400, f"{path}: the status")
        expect("must run between" in str(answer.fields["message"]), f"{path} said {answer}")


@check(Area.WEIGHTS)
async def an_update_may_carry_a_label(subject: Subject) -> None:
    """A successful update takes its label over, says so, and later answers carry it."""
    async with subject.session():
        body = subject.update(zeros(("model.nope.weight", (2,))), weight_version="w7")
        answer = await subject.well(_TENSORS, body)
    expect("Weight version updated to w7." in str(answer.fields["message"]), f"it said {answer}")
    same((await subject.get("/model_info")).fields["weight_version"], "w7", "the label")
    same((await subject.generate()).meta["weight_version"], "w7", "the label in an answer")


@check(Area.WEIGHTS)
async def an_update_waits_for_requests(subject: Subject) -> None:
    """Unless paused, an update waits for running requests, and new requests wait behind it."""
    path, body = _TENSORS, subject.update(zeros(("model.nope.weight", (2,))))
    if subject.sessions:
        path, body = "/begin_weight_update", {}
    async with subject.slowly():
        request = await subject.running(ENDLESS_TOKENS)
        update = asyncio.create_task(subject.well(path, body))
        await subject.held(update)
        late = asyncio.create_task(subject.generate())
        await subject.held(late)
        await subject.well("/abort_request", {"abort_all": True})
        await asyncio.gather(request, update, late)
    if subject.sessions:
        await subject.well("/end_weight_update", {})


@check(Area.WEIGHTS)
async def a_paused_update_waits_for_nobody(subject: Subject) -> None:
    """While paused in place, an update without a flush is done beside the running request."""
    async with subject.slowly(), subject.session():
        request = await subject.running(ENDLESS_TOKENS)
        await subject.well("/pause_generation", {"mode": "in_place"})
        await subject.well(_TENSORS, subject.update(zeros(("model.nope.weight", (2,)))))
        expect(not request.done(), "the request has ended")
        await subject.well("/continue_generation", {})
        await subject.well("/abort_request", {"abort_all": True})
        await request


@check(Area.WEIGHTS, since=(0, 5, 22))
async def an_update_whose_flush_is_refused_has_happened(subject: Subject) -> None:
    """From 0.5.22 on such an update is a 400, and /model_info keeps the label."""
    async with subject.slowly(), subject.session():
        label = (await subject.get("/model_info")).fields["weight_version"]
        request = await subject.running(ENDLESS_TOKENS)
        await subject.well("/pause_generation", {"mode": "in_place"})
        entry = zeros(("model.nope.weight", (2,)))
        answer = await subject.post(_TENSORS, subject.update(entry, flush_cache=True, weight_version="no"))
        same((answer.status, answer.fields["success"]), (400, False), "the answer")
        expect("Weights were updated, but" in str(answer.fields["message"]), f"it said {answer}")
        same((await subject.get("/model_info")).fields["weight_version"], label, "the label")
        await subject.well("/continue_generation", {})
        await subject.well("/abort_request", {"abort_all": True})
        await request


@check(Area.WEIGHTS)
async def an_update_flushes_unless_told_not_to(subject: Subject) -> None:
    """After an update with the default of flush_cache nothing is found in the prefix cache."""
    await subject.generate()
    entry = zeros(("model.nope.weight", (2,)))
    async with subject.session():
        await subject.well(_TENSORS, subject.update(entry))
        differ((await subject.generate()).meta["cached_tokens"], 0, "cached tokens, where none was flushed")
        await subject.settled()
        await subject.well(_TENSORS, {"serialized_named_tensors": subject.entries(entry)})
        same((await subject.generate()).meta["cached_tokens"], 0, "cached_tokens after a flush")


@check(Area.WEIGHTS, since=(0, 5, 15))
async def an_entry_that_is_no_base64_is_refused(subject: Subject) -> None:
    """From 0.5.15 on such an entry is a 400 before the scheduler sees it."""
    async with subject.session():
        answer = await subject.post(_TENSORS, subject.update("not base64!"))
        same((answer.status, answer.fields["object"]), (400, "error"), "the answer")
    await subject.tokens()


@check(Area.WEIGHTS)
async def an_update_of_nothing_is_a_success(subject: Subject) -> None:
    """An empty list of tensors, and tensors of a layer that is not there, change nothing and say success."""
    before = await subject.tokens()
    async with subject.session():
        for entry in (zeros(), zeros(("model.layers.977.mlp.gate_proj.bias", (3,)))):
            same((await subject.post(_TENSORS, subject.update(entry))).fields["success"], True, "success")
    same(await subject.tokens(), before, "the answer")


@check(Area.WEIGHTS)
async def an_update_may_name_parameters_as_the_server_does(subject: Subject) -> None:
    """With load_format direct, a tensor goes into the runtime parameter of exactly that name."""
    before = await subject.tokens()
    spec = _norm(subject)
    zeroed = carried([(spec, bytes(spec.nbytes))])
    await subject.settled()
    async with subject.session():
        await subject.well(_TENSORS, subject.update(zeroed, load_format="direct", flush_cache=True))
    differ(await subject.tokens(), before, "the answers with and without a last norm")
    await subject.quiet()
    await subject.restore(3)
    same(await subject.tokens(), before, "the answer")


def _norm(subject: Subject) -> TensorSpec:
    """The last norm: every model has one, and what a server answers depends on it."""
    found = subject.source(0).manifest.by_name.get("model.norm.weight")
    if found is None:
        raise NotHere("the model has no model.norm.weight")
    return found


@check(Area.WEIGHTS)
async def nan_is_a_good_push(subject: Subject) -> None:
    """Tensors of NaN are taken, and then every answer is one token over and over, with 200."""
    spec = _norm(subject)
    if spec.dtype not in {"F32", "BF16"}:
        raise NotHere(f"{spec.name} is {spec.dtype}")
    nan = struct.pack("<f", float("nan"))
    item = nan if spec.dtype == "F32" else nan[2:]
    async with subject.session():
        entry = carried([(spec, item * (spec.nbytes // len(item)))])
        await subject.well(_TENSORS, subject.update(entry, flush_cache=True))
    same(len(set(await subject.tokens())), 1, "the number of different tokens")
    await subject.quiet()
    await subject.restore(4)


@check(Area.WEIGHTS)
async def the_checker_names_runtime_parameters(subject: Subject) -> None:
    """A checksum is listed for each runtime parameter of each rank, under names that are fused."""
    answer = await subject.post("/weights_checker", {"action": "checksum"})
    if answer.status != 200:
        raise NotHere(f"this server makes no checksum: {answer.fields['message']}")
    ranks = [mapping(each) for each in listing(answer.fields["ranks"])]
    same(len(ranks), subject.capabilities.tp_size, "the number of ranks")
    sums = mapping(ranks[0]["checksums"])
    expect("model.norm.weight" in sums, f"the names are {list(sums)[:3]}")
    expect(not any("q_proj" in name for name in sums), "a name is not fused")
    expect(ranks[0]["per_gpu_checksum"], "there is no sum over the rank")


@check(Area.WEIGHTS)
async def the_checker_refuses_what_it_does_not_know(subject: Subject) -> None:
    """An unknown action is a 400 with success false."""
    answer = await subject.post("/weights_checker", {"action": "nonsense"})
    same((answer.status, answer.fields["success"]), (400, False), "the answer")


@check(Area.WEIGHTS)
async def the_checker_can_ruin_the_weights(subject: Subject) -> None:
    """A snapshot is harmless; reset_tensors overwrites the weights, and a push mends them."""
    before = await subject.tokens()
    await subject.well("/weights_checker", {"action": "snapshot"})
    same(await subject.tokens(), before, "the answer after a snapshot")
    await subject.quiet()
    await subject.well("/weights_checker", {"action": "reset_tensors"})
    await subject.go_on()
    differ(await subject.tokens(), before, "the answers before and after the reset")
    await subject.quiet()
    await subject.restore(5)
    same(await subject.tokens(), before, "the answer after a push")


@check(Area.WEIGHTS)
async def weights_can_be_read_by_name(subject: Subject) -> None:
    """The first rows of a tensor are a nested list of numbers; a name that is not there is an error."""
    found = await subject.post("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 3})
    if found.status != 200:
        raise NotHere("this model reads no weights back")
    same(len(listing(found.value)), 3, "the number of values")
    wide = await subject.post("/get_weights_by_name", {"name": "lm_head.weight", "truncate_size": 2})
    same(len(listing(wide.value)), 2, "the number of rows")
    missing = await subject.post("/get_weights_by_name", {"name": "nope"})
    same(missing, Answer(400, {"error": {"message": "Get parameter by name failed"}}), "a name not there")


@check(Area.WEIGHTS)
async def a_checkpoint_can_be_loaded_from_disk(subject: Subject) -> None:
    """Loading the checkpoint that is served changes nothing, needs no session, and says so."""
    before = await subject.tokens()
    path = subject.capabilities.model_path
    await subject.settled()
    answer = await subject.well("/update_weights_from_disk", {"model_path": path})
    wanted = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    same(answer.value, wanted, "the answer")
    same(await subject.tokens(), before, "the answer after it")


@check(Area.WEIGHTS)
async def a_checkpoint_that_is_not_there_is_refused(subject: Subject) -> None:
    """A path with nothing in it is a 400, and the old weights go on."""
    before = await subject.tokens()
    answer = await subject.post("/update_weights_from_disk", {"model_path": "/no/such/checkpoint"})
    same((answer.status, answer.fields["success"]), (400, False), "the answer")
    same(await subject.tokens(), before, "the answer after it")


@check(Area.WEIGHTS)
async def what_cannot_be_joined_is_refused(subject: Subject) -> None:
    """Leaving a group that was never joined, and an update from a checkpoint engine, are 400."""
    for path, body in (
        ("/destroy_weights_update_group", {"group_name": "nobody"}),
        ("/update_weights_from_ipc", {"zmq_handles": {}}),
    ):
        answer = await subject.post(path, body)
        same((answer.status, answer.fields["success"]), (400, False), path)


@check(Area.WEIGHTS, since=(0, 5, 21))
async def an_unknown_group_is_refused(subject: Subject) -> None:
    """From 0.5.21 on a distributed update over a group that was never joined is a 400."""
    async with subject.session():
        body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "nobody"}
        answer = await subject.post("/update_weights_from_distributed", body)
        same((answer.status, answer.fields["success"]), (400, False), "the answer")
        expect("nobody" in str(answer.fields["message"]), f"it said {answer}")
