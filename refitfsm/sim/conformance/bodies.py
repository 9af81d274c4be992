"""Requests that do not fit: each is an answer, never a death, and changes nothing."""

from typing import Final

from refitfsm.sim.conformance.expect import expect, mapping, same
from refitfsm.sim.conformance.registry import Area, check
from refitfsm.sim.conformance.subject import Answer, Subject, asking

_CONTROL: Final = (
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/abort_request",
)


def _misfit(answer: Answer, path: str) -> None:
    """400 and never 422, in the shape that SGLang gives to a body that does not fit."""
    same(answer.status, 400, f"{path}: the status")
    same(answer.fields["object"], "error", f"{path}: the field object")
    same(answer.fields["code"], 400, f"{path}: the field code")
    same(answer.fields["type"], "Bad Request", f"{path}: the field type")


@check(Area.BODIES)
async def a_control_call_wants_a_body(subject: Subject) -> None:
    """A control call without a body is a 400, also where all fields have defaults, and does nothing."""
    before = await subject.tokens()
    for path in _CONTROL:
        _misfit(await subject.post(path), path)
    same(await subject.tokens(), before, "the answer")


@check(Area.BODIES, since=(0, 5, 21))
async def a_session_call_wants_a_body(subject: Subject) -> None:
    """Begin and end without a body are a 400 each, and open nothing."""
    for path in ("/begin_weight_update", "/end_weight_update"):
        _misfit(await subject.post(path), path)
    same((await subject.post("/end_weight_update", {})).status, 400, "an end after that")


@check(Area.BODIES, since=(0, 5, 13))
async def the_checker_wants_no_body(subject: Subject) -> None:
    """The weights checker takes GET and POST without a body."""
    for answer in (await subject.post("/weights_checker"), await subject.get("/weights_checker")):
        expect("success" in answer.fields, f"it answered {answer}")


@check(Area.BODIES)
async def a_flush_wants_no_body(subject: Subject) -> None:
    """A flush takes GET and POST, and says what it did in words."""
    for answer in (await subject.post("/flush_cache"), await subject.get("/flush_cache")):
        same(answer.status, 200, "the status")
        expect(str(answer.value).startswith("Cache flushed."), f"it said {answer.value}")


@check(Area.BODIES)
async def an_impossible_flush_timeout_is_refused(subject: Subject) -> None:
    """A flush's timeout is a number of seconds, zero or more."""
    for timeout in ("-1", "soon"):
        path = f"/flush_cache?timeout={timeout}"
        _misfit(await subject.post(path), path)


@check(Area.BODIES)
async def an_unknown_pause_mode_is_refused(subject: Subject) -> None:
    """A pause in a mode that does not exist is a 400 and pauses nothing."""
    _misfit(await subject.post("/pause_generation", {"mode": "bogus"}), "/pause_generation")
    await subject.tokens()


@check(Area.BODIES, since=(0, 5, 21))
async def an_unknown_selector_is_refused(subject: Subject) -> None:
    """A session for what does not exist is a 400 and opens nothing."""
    _misfit(await subject.post("/begin_weight_update", {"selector": "bogus"}), "/begin_weight_update")
    same((await subject.post("/end_weight_update", {})).status, 400, "an end after that")


@check(Area.BODIES)
async def unknown_fields_are_ignored(subject: Subject) -> None:
    """A field that nobody knows changes nothing."""
    await subject.well("/pause_generation", {"nonsense": 1})
    await subject.well("/continue_generation", {"nonsense": [2]})
    await subject.tokens()


@check(Area.BODIES)
async def a_field_of_a_wrong_type_is_refused(subject: Subject) -> None:
    """Tags that are no list are a 400, and nothing is released."""
    before = await subject.tokens()
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        _misfit(await subject.post(path, {"tags": 7}), path)
        _misfit(await subject.post(path, {"tags": ["weights", 7]}), path)
    same(await subject.tokens(), before, "the answer")


@check(Area.BODIES)
async def a_body_that_is_no_json_is_refused(subject: Subject) -> None:
    """Broken JSON, and JSON that is no object, are a 400."""
    for body in (b'{"mode": ', b"null", b"[]", b'"abort"'):
        _misfit(await subject.post("/pause_generation", body), f"/pause_generation {body!r}")
    await subject.tokens()


@check(Area.BODIES)
async def a_required_field_is_missed(subject: Subject) -> None:
    """An update without tensors, without a path, or a version without its name, is a 400."""
    for path in ("/update_weights_from_tensor", "/update_weights_from_disk", "/update_weight_version"):
        _misfit(await subject.post(path, {}), path)


@check(Area.BODIES)
async def an_unknown_path_is_not_found(subject: Subject) -> None:
    """A path that no release has is a 404 with a detail."""
    answer = await subject.post("/no_such_path", {})
    same(answer, Answer(404, {"detail": "Not Found"}), "the answer")


@check(Area.BODIES)
async def a_wrong_method_is_refused(subject: Subject) -> None:
    """Calls that change something and are not of the memory family take no GET."""
    for path in ("/pause_generation", "/continue_generation", "/update_weights_from_tensor"):
        same(await subject.get(path), Answer(405, {"detail": "Method Not Allowed"}), path)


@check(Area.BODIES)
async def a_request_needs_a_prompt(subject: Subject) -> None:
    """A generation without any prompt, or with an empty one, is an error and not a death."""
    bodies: tuple[dict[str, object], ...] = ({}, {"sampling_params": {}}, asking(input_ids=[]))
    for body in bodies:
        answer = await subject.post("/generate", body)
        same(answer.status, 400, f"{body}: the status")
        expect(mapping(answer.fields["error"])["message"], f"{body}: it says nothing")


@check(Area.BODIES)
async def a_prompt_of_a_wrong_type_is_refused(subject: Subject) -> None:
    """Token ids that are no list of numbers are an error and not a death."""
    for prompt in ("x", ["x"], {"a": 1}):
        answer = await subject.post("/generate", asking(input_ids=prompt))
        same(answer.status, 400, f"{prompt!r}: the status")


@check(Area.BODIES)
async def impossible_lengths_are_refused(subject: Subject) -> None:
    """A negative number of new tokens, and more than fit behind the prompt, are errors in words."""
    for count in (-1, 10_000_000):
        answer = await subject.post("/generate", asking(count))
        same(answer.status, 400, f"{count} tokens: the status")
        expect(mapping(answer.fields["error"])["message"], f"{count} tokens: it says nothing")
