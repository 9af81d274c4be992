"""Faults: the words they are written in, and what each does in process."""

import asyncio
import json

import pytest

from refitfsm.drivers.transport import AnswerLost, NotSent, TransportError
from refitfsm.model.states import ALL_TAGS, Tag
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.faults import FaultPlan, Kind, parse_fault
from refitfsm.sim.loop import run

from .client import Client

RELEASE = "/release_memory_occupation"
HELD = {Tag.CUDA_GRAPH}


def _client(*specs: str) -> Client:
    return Client(faults=FaultPlan(parse_fault(spec) for spec in specs))


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("kill@/update_weights_from_tensor:2", (Kind.KILL, 0.0, "/update_weights_from_tensor", 2, 2)),
        ("lose-answer@/flush_cache", (Kind.LOSE_ANSWER, 0.0, "/flush_cache", 1, 1)),
        ("delay=2.5@*:3+", (Kind.DELAY, 2.5, "*", 3, None)),
        ("status-after@/v1/loads:*", (Kind.STATUS_AFTER, 502.0, "/v1/loads", 1, None)),
        ("success-false=400@/flush_cache", (Kind.SUCCESS_FALSE, 400.0, "/flush_cache", 1, 1)),
    ],
)
def test_a_fault_is_read(spec: str, fault: tuple[object, ...]) -> None:
    """Kind, argument, path and which calls are read from one word."""
    assert parse_fault(spec) == fault


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "kill",
        "kill@",
        "kill@flush_cache",
        "explode@/flush_cache",
        "delay@/flush_cache",
        "delay=soon@/flush_cache",
        "delay=-1@/flush_cache",
        "status-before=99@/flush_cache",
        "kill=3@/flush_cache",
        "kill@/flush_cache:0",
        "kill@/flush_cache:x",
        "kill@/flush_cache:1:2",
    ],
)
def test_a_bad_word_is_one_line(spec: str) -> None:
    """What is no fault is an error in one line that shows the word."""
    with pytest.raises(ValueError, match="fault ") as raised:
        parse_fault(spec)
    assert "\n" not in str(raised.value)


def test_calls_are_counted_by_path() -> None:
    """A fault of a path counts its calls only; one for all counts every call; the plan remembers both."""
    plan = FaultPlan([parse_fault("kill@/a:2"), parse_fault("refuse@*:4")])
    drawn = [plan.draw(path) for path in ("/a", "/b", "/a", "/b", "/a")]
    assert [fault and fault.kind for fault in drawn] == [None, None, Kind.KILL, Kind.REFUSE, None]
    assert [path for path, _ in plan.struck] == ["/a", "/b"]


@pytest.mark.parametrize(
    ("spec", "error", "applied"),
    [
        ("refuse", NotSent, False),
        ("lose-request", AnswerLost, False),
        ("lose-answer", AnswerLost, True),
        ("kill", AnswerLost, False),
        ("kill-after", AnswerLost, True),
    ],
)
def test_a_broken_connection_says_nothing_of_what_was_done(
    spec: str, error: type[TransportError], applied: bool
) -> None:
    """The client is told the same whether the call was applied or not; the true record tells."""

    async def main() -> None:
        client = _client(f"{spec}@{RELEASE}")
        with pytest.raises(error):
            await client.post(RELEASE)
        assert client.truth.alive == (not spec.startswith("kill"))
        assert (client.truth.memory.released != set()) == applied

    run(main())


@pytest.mark.parametrize(
    ("spec", "status", "body", "applied"),
    [
        ("status-before=502", 502, b"", False),
        ("status-after=504", 504, b"", True),
        ("lie", 200, b"null", False),
        ("garble", 200, b'{"success": tru', True),
        ("success-false", 200, b'{"success":false,"message":"refused by a fault"}', False),
    ],
)
def test_an_answer_may_be_untrue(spec: str, status: int, body: bytes, applied: bool) -> None:
    """An answer of any status may stand before or after the effect."""

    async def main() -> None:
        client = _client(f"{spec}@{RELEASE}")
        assert await client.call("POST", RELEASE, {}) == (status, body)
        assert client.truth.resident == (HELD if applied else ALL_TAGS)

    run(main())


def test_late_requests_and_late_answers() -> None:
    """A slow request is applied late, a delayed answer early; both are answered late."""

    async def main() -> None:
        for spec, early in ((f"slow=3@{RELEASE}", ALL_TAGS), (f"delay=3@{RELEASE}", HELD)):
            client = _client(spec)
            started = asyncio.get_running_loop().time()
            call = asyncio.create_task(client.post(RELEASE))
            await asyncio.sleep(1)
            assert client.truth.resident == early
            assert await call == 200
            assert asyncio.get_running_loop().time() - started == pytest.approx(3)
            assert client.truth.resident == HELD

    run(main())


def test_a_duplicated_release_kills() -> None:
    """The second copy of a call that must come once does what a second call does."""

    async def main() -> None:
        client = _client(f"duplicate@{RELEASE}")
        with pytest.raises(AnswerLost, match="not active"):
            await client.post(RELEASE)

    run(main())


@pytest.mark.parametrize(("spec", "resident"), [("hang-before", ALL_TAGS), ("hang-after", HELD)])
def test_a_hung_call_ends_with_the_clients_patience(spec: str, resident: set[Tag]) -> None:
    """No answer ever comes; the effect is there or not."""

    async def main() -> None:
        client = _client(f"{spec}@{RELEASE}")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await client.post(RELEASE)
        assert client.truth.resident == resident

    run(main())


def test_a_corrupted_push_shows_in_the_checksum() -> None:
    """The update answers success, and only the content tells that a tensor is not what was sent."""

    async def main() -> None:
        client = _client("corrupt@/update_weights_from_tensor")
        assert await client.push("$seed1") == 200
        assert client.truth.weights_digest() not in {digest_of(tiny_model(1)), None}
        assert await client.push("$seed1") == 200
        assert client.truth.weights_digest() == digest_of(tiny_model(1))

    run(main())


def test_a_lie_about_a_flush_leaves_the_cache() -> None:
    """A flush that answers 200 and does nothing: the stale prefix is used, and is on record."""

    async def main() -> None:
        client = _client("lie@/flush_cache")
        await client.tokens()
        await client.push("$seed1", flush_cache=False)
        assert json.loads((await client.call("GET", "/model_info")).body)["weight_version"] == "default"
        assert await client.post("/flush_cache") == 200
        await client.tokens()
        assert client.truth.answers[-1].kv_read == (digest_of(tiny_model(0)),)

    run(main())


def test_a_lost_stream_has_begun() -> None:
    """A streamed request whose answer is lost runs in the server until its client is missed."""

    async def main() -> None:
        client = _client("lose-answer@/generate")
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 900}, "stream": True}
        with pytest.raises(AnswerLost):
            await client.call("POST", "/generate", body)
        assert not client.truth.idle()
        await asyncio.sleep(3)
        assert client.truth.answers[-1].aborted or len(client.truth.answers[-1].tokens) == 900

    run(main())
