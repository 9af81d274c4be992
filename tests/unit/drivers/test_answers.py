"""A status is not enough: an answer is believed where it says what SGLang says."""

import pytest

from refitfsm.drivers.answers import Ended, first_values, judge, read
from refitfsm.drivers.labels import label, origin, stamp, version_of
from refitfsm.drivers.transport import Reply
from refitfsm.model.values import DONE, CommandKind, EventName

OK = {
    CommandKind.FLUSH: b"Cache flushed.\nPlease check backend logs for more details.\n",
    CommandKind.PAUSE: b'{"message":"Generation paused successfully.","status":"ok"}',
    CommandKind.CONTINUE: b'{"message":"Generation continued successfully.","status":"ok"}',
    CommandKind.RELEASE: b"null",
    CommandKind.RESUME: b"null",
    CommandKind.BEGIN: b'{"success":true,"message":"Success"}',
    CommandKind.PUSH: b'{"success":true,"message":"Success"}',
    CommandKind.END: b'{"success":true,"message":"Success"}',
}
FOREIGN = (
    b"<html><body>Please log in</body></html>",
    b'{"error":{"message":"upstream busy"}}',
    b'{"ok":1}',
    b"[]",
    b'"done"',
    b"\xff\xfe",
)


def seen(kind: CommandKind, status: int, body: bytes) -> EventName:
    return judge(read(Reply(status, body)), kind, DONE[kind]).event


@pytest.mark.parametrize("kind", OK)
def test_sglangs_own_answers_are_good(kind: CommandKind) -> None:
    """What SGLang answers when it has done a command is its good end."""
    assert seen(kind, 200, OK[kind]) is DONE[kind]


@pytest.mark.parametrize("kind", OK)
@pytest.mark.parametrize("body", FOREIGN)
def test_a_strangers_200_proves_nothing(kind: CommandKind, body: bytes) -> None:
    """A login page, a proxy's error or any other body with 200 is a lost answer."""
    assert seen(kind, 200, body) is EventName.LOST


@pytest.mark.parametrize("status", [301, 302, 307, 500, 502, 503, 504])
@pytest.mark.parametrize("kind", OK)
def test_what_stands_between_does_not_speak_for_the_server(kind: CommandKind, status: int) -> None:
    """A redirect, a gateway's error or an exception that nobody caught leaves the outcome unknown."""
    assert seen(kind, status, b"") is EventName.LOST
    assert seen(kind, status, b"Internal Server Error") is EventName.LOST


def test_success_false_is_a_failure_whatever_the_status() -> None:
    """The body's word counts more than the status."""
    assert seen(CommandKind.PUSH, 200, b'{"success":false,"message":"no"}') is EventName.FAILED


def test_a_refusal_is_told_from_a_write_that_failed() -> None:
    """A 400 before the payload was looked at changed nothing; one after may have."""
    validation = b'{"object":"error","message":"Field required","type":"Bad Request","code":400}'
    outside = b'{"success":false,"message":"x must run between begin_weight_update() and y"}'
    partly = b'{"success":false,"message":"partially updated. Please discard the whole weights."}'
    assert seen(CommandKind.PUSH, 400, validation) is EventName.REFUSED
    assert seen(CommandKind.PUSH, 400, outside) is EventName.REFUSED
    assert seen(CommandKind.PUSH, 400, partly) is EventName.FAILED
    assert seen(CommandKind.FLUSH, 400, b"Flush cache failed.\n") is EventName.REFUSED


def test_labels_keep_what_they_replace() -> None:
    """A stamp stands for version 0 of its run, and what it replaced can be read from it, twice over."""
    first = stamp("run1", "http://a:1", "default")
    second = stamp("run2", "http://a:1", first)
    assert version_of(first, "run1") == 0
    assert version_of(first, "run2") == -1
    assert origin("default") == origin(first) == origin(second) == ("", "default")
    pushed = label("run1", 5)
    assert version_of(pushed, "run1") == 5
    assert origin(pushed) == origin(stamp("run2", "http://a:1", pushed)) == (pushed, "")
    assert stamp("run1", "http://a:1", "x") != stamp("run1", "http://b:1", "x")
    for odd in ("", "refitfsm", "refitfsm:run1", "refitfsm:run1:x", "a:b:c:d:e", "refitfsm:run1:²"):
        assert version_of(odd, "run1") == -1


@pytest.mark.parametrize(
    ("status", "body", "values"),
    [
        (200, b"[[1.0,-2.5,null],[3,4,5]]", (1.0, -2.5, None)),
        (200, b"[1.0,2]", (1.0, 2)),
        (200, b"[]", ()),
        (400, b'{"error":{"message":"Get parameter by name failed"}}', None),
    ],
)
def test_values_that_are_read_back(status: int, body: bytes, values: tuple[float | None, ...] | None) -> None:
    """Of a matrix the first row, of a vector all that came; nothing where SGLang cannot read it back."""
    assert first_values(read(Reply(status, body))) == values


@pytest.mark.parametrize(
    ("status", "body", "event"),
    [
        (200, b"{}", EventName.LOST),
        (200, b'["a"]', EventName.LOST),
        (200, b"[[[1.0]]]", EventName.LOST),
        (502, b"", EventName.LOST),
        (400, b'{"object":"error","message":"name missing"}', EventName.REFUSED),
        (401, b'{"error":"Unauthorized"}', EventName.REFUSED),
        (500, b"Internal Server Error", EventName.LOST),
    ],
)
def test_anything_else_that_is_read_back_ends_the_proof(status: int, body: bytes, event: EventName) -> None:
    """A stranger's answer proves nothing, and accuses nobody of other weights."""
    with pytest.raises(Ended, match="read back: ") as ended:
        first_values(read(Reply(status, body)))
    assert ended.value.observation.event is event
