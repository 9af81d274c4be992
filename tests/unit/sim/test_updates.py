"""Updates, locks and versions, by release."""

import asyncio
import json

import pytest

from refitfsm.drivers.transport import AnswerLost
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.loop import run

from .client import Client, timings

B4, B5, B6 = "0.5.20", "0.5.21", "0.5.22"
SEED0, SEED1 = digest_of(tiny_model(0)), digest_of(tiny_model(1))
STEP = timings(decode_s=(0.004, 0.004))
RELEASE = "/release_memory_occupation"
UPDATE = "/update_weights_from_tensor"


async def _paused(version: str, mode: str) -> Client:
    """A server paused with one request in flight, in a session where the release has them."""
    client = Client(sglang_version=version, timings=STEP)
    held = client.held = asyncio.create_task(client.generate(500))  # type: ignore[attr-defined]
    held.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.sleep(0.1)
    await client.post("/pause_generation", {"mode": mode})
    if client.truth.profile.sessions_required:
        await client.post("/begin_weight_update")
    return client


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("version", [B4, B5, B6])
def test_release_beside_a_held_request(version: str, mode: str) -> None:
    """A queued request is ignored from 0.5.21 on, a running one never is: the release kills."""

    async def main() -> None:
        client = await _paused(version, mode)
        if mode == "retract" and version != B4:
            assert await client.post(RELEASE) == 200
            return
        with pytest.raises(AnswerLost, match="only when server is idle"):
            await client.post(RELEASE)

    run(main())


@pytest.mark.parametrize(
    ("version", "mode", "status"),
    [
        (B4, "retract", 0),
        (B4, "in_place", 0),
        (B5, "retract", 200),
        (B5, "in_place", 0),
        (B6, "in_place", 400),
    ],
)
def test_update_with_a_flush_beside_a_held_request(version: str, mode: str, status: int) -> None:
    """A flush that is refused after an update kills up to 0.5.21 and is a 400 later; 0 stands for death."""

    async def main() -> None:
        client = await _paused(version, mode)
        body = {"serialized_named_tensors": ["$seed1"]}
        if status == 0:
            with pytest.raises(AnswerLost, match="flush"):
                await client.post(UPDATE, body)
            return
        assert await client.post(UPDATE, body) == status
        assert client.truth.weights_digest() == SEED1

    run(main())


def test_a_flush_that_waits_counts_the_queue_in_every_release() -> None:
    """While paused with a queued request a flush at once succeeds from 0.5.21 on, one with a timeout not."""

    async def main() -> None:
        client = await _paused(B6, "retract")
        assert await client.post("/flush_cache") == 200
        assert await client.post("/flush_cache?timeout=3") == 400

    run(main())


def test_bad_base64_kills_older_releases() -> None:
    """Up to 0.5.14 a payload that is not base64 reaches the scheduler; later it is a 400."""

    async def main() -> None:
        body = {"serialized_named_tensors": ["not base64!"]}
        assert await Client(sglang_version="0.5.15").post(UPDATE, body) == 400
        with pytest.raises(AnswerLost):
            await Client(sglang_version="0.5.14").post(UPDATE, body)

    run(main())


def test_an_unknown_group_kills_older_releases() -> None:
    """Up to 0.5.20 a distributed update of an unknown group kills; later it is a 400."""

    async def main() -> None:
        body: dict[str, object] = {"names": [], "dtypes": [], "shapes": []}
        with pytest.raises(AnswerLost, match="Group"):
            await Client(sglang_version=B4).post("/update_weights_from_distributed", body)

    run(main())


def test_a_writer_waits_for_readers_and_holds_back_new_ones() -> None:
    """An update of a server that is not paused waits for running requests, and new ones wait behind it."""

    async def main() -> None:
        client = Client(sglang_version=B4, timings=STEP)
        order: list[str] = []

        async def note(name: str, work: asyncio.Task[object]) -> None:
            await work
            order.append(name)

        jobs = [
            ("first", client.generate(100)),
            ("update", client.push("$seed1")),
            ("second", client.generate(5)),
        ]
        waits = []
        for name, work in jobs:
            waits.append(asyncio.create_task(note(name, asyncio.create_task(work))))
            await asyncio.sleep(0.05)
        await asyncio.gather(*waits)
        assert order == ["first", "update", "second"]
        assert [answer.weights[0].label for answer in client.truth.answers] == [SEED0, SEED1]

    run(main())


def test_a_continue_waits_for_an_update_in_progress() -> None:
    """While paused an update holds the gate, except in 0.5.10, where a continue slips in."""

    async def main() -> None:
        for version, waits in (("0.5.10", False), ("0.5.11", True)):
            client = Client(sglang_version=version, timings=timings(push_s=(1.0, 1.0)))
            await client.post("/pause_generation")
            update = asyncio.create_task(client.push("$seed1"))
            await asyncio.sleep(0.5)
            started = asyncio.get_running_loop().time()
            await client.post("/continue_generation")
            await update
            assert client.truth.weights_digest() == SEED1
            gate_waited = not waits or asyncio.get_running_loop().time() - started >= 0.5
            assert gate_waited

    run(main())


def test_a_new_version_aborts_unless_told_not_to() -> None:
    """/update_weight_version aborts what runs by default, and sets the label either way."""

    async def main() -> None:
        for abort, reason in ((True, "abort"), (False, "length")):
            client = Client(timings=STEP)
            running = asyncio.create_task(client.generate(50))
            await asyncio.sleep(0.05)
            body = {"new_version": "v9"} if abort else {"new_version": "v9", "abort_all_requests": False}
            assert await client.post("/update_weight_version", body) == 200
            assert (await running)["meta_info"]["finish_reason"]["type"] == reason
            assert (await client.get("/model_info"))["weight_version"] == "v9"

    run(main())


def test_a_disk_update_takes_the_path_for_its_name() -> None:
    """A checkpoint that is known is loaded and named; one of another shape kills."""

    async def main() -> None:
        other = {"model.norm.weight": tiny_model(0)["lm_head.weight"]}
        client = Client(checkpoints={"next": tiny_model(1), "other": other})
        assert await client.post("/update_weights_from_disk", {"model_path": "next"}) == 200
        info = await client.get("/model_info")
        assert (info["model_path"], info["served_model_name"]) == ("next", "next")
        assert client.truth.weights_digest() == SEED1
        with pytest.raises(AnswerLost, match="AssertionError"):
            await client.post("/update_weights_from_disk", {"model_path": "other"})

    run(main())


def test_the_checksum_is_of_the_content() -> None:
    """Two servers with the same weights have the same checksum, whatever has happened to them before."""

    async def main() -> None:
        pushed, booted = Client(tp_size=2), Client(tp_size=2, parameters=tiny_model(1))
        await pushed.post("/begin_weight_update")
        await pushed.post(UPDATE, {"serialized_named_tensors": ["$seed1", "$seed1"]})
        sums = [json.loads((await each.call("POST", "/weights_checker")).body) for each in (pushed, booted)]
        assert sums[0] == sums[1]
        assert len(sums[0]["ranks"]) == 2
        assert sums[0]["ranks"][0]["per_gpu_checksum"] != sums[0]["ranks"][1]["per_gpu_checksum"]

    run(main())
