"""Memory, and the life and death of a server."""

import asyncio
import json

import pytest

from refitfsm.drivers.transport import AnswerLost, NotSent
from refitfsm.model.states import ALL_TAGS, Tag
from refitfsm.sim.choices import SeededChooser
from refitfsm.sim.config import SimConfig, Timings
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.ledger import GpuLedger
from refitfsm.sim.loop import run
from refitfsm.sim.server import SimServer
from refitfsm.sim.transport import SimTransport

from .client import Client, timings

SEED0 = digest_of(tiny_model(0))
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


def test_backup_keeps_the_weights_over_a_release() -> None:
    """With a CPU backup the weights are what they were after a resume; while released they are none."""

    async def main() -> None:
        client = Client(weights_cpu_backup=True)
        await client.post(RELEASE)
        assert client.truth.weights_digest() is None
        await client.post(RESUME)
        assert client.truth.weights_digest() == SEED0

    run(main())


@pytest.mark.parametrize("graphs", [False, True])
def test_the_graph_tag_is_memory_only_by_option(graphs: bool) -> None:
    """Without the option cuda_graph is on the list and its memory stays; with it, generation kills."""

    async def main() -> None:
        client = Client(cuda_graph_in_saver=graphs)
        assert await client.post(RELEASE, {"tags": ["cuda_graph"]}) == 200
        assert client.truth.memory.listed == {"cuda_graph"}
        assert client.truth.resident == (ALL_TAGS - {Tag.CUDA_GRAPH} if graphs else ALL_TAGS)
        if graphs:
            with pytest.raises(AnswerLost):
                await client.generate()
        else:
            await client.generate()

    run(main())


def test_an_unknown_tag_is_remembered_and_does_nothing() -> None:
    """Any string is a tag: it is listed, frees nothing, and may be resumed once."""

    async def main() -> None:
        client = Client()
        assert await client.post(RELEASE, {"tags": ["nonsense"]}) == 200
        assert client.truth.resident == ALL_TAGS
        assert await client.post(RESUME, {"tags": ["nonsense"]}) == 200
        with pytest.raises(AnswerLost, match="KeyError: 'nonsense'"):
            await client.post(RESUME, {"tags": ["nonsense"]})

    run(main())


def test_a_tag_listed_twice_kills_a_resume() -> None:
    """The second mention of a tag in one resume is not on the list any more."""

    async def main() -> None:
        client = Client(memory_saver=False)
        await client.post(RELEASE)
        with pytest.raises(AnswerLost, match="KeyError"):
            await client.post(RESUME, {"tags": ["weights", "weights"]})

    run(main())


def test_the_ledger_follows_release_and_resume() -> None:
    """Released bytes are free for others, resumed ones are not, and a death frees all of them."""

    async def main() -> None:
        ledger = GpuLedger({"GPU-0": 1000})
        config = SimConfig(
            gpus=("GPU-0",),
            weights_bytes=300,
            kv_cache_bytes=500,
            cuda_graph_bytes=100,
            fixed_bytes=50,
            timings=timings(),
        )
        client = Client(SimServer(config, ledger=ledger))
        assert ledger.used("GPU-0") == 950
        await client.post(RELEASE, {"tags": ["kv_cache"]})
        assert ledger.used("GPU-0") == 450
        assert ledger.take("GPU-0", "trainer", 500)
        with pytest.raises(AnswerLost, match="out of memory"):
            await client.post(RESUME, {"tags": ["kv_cache"]})
        assert ledger.holders("GPU-0") == {"trainer": 500}
        assert not client.server.restart()
        ledger.give_back("GPU-0", "trainer")
        assert client.server.restart()
        assert ledger.used("GPU-0") == 950

    run(main())


def test_no_server_starts_without_room() -> None:
    """A server whose bytes do not fit is an error that names the GPUs, and holds nothing."""
    ledger = GpuLedger({"GPU-0": 1})
    with pytest.raises(ValueError, match="GPU-0"):
        SimServer(SimConfig(gpus=("GPU-0",)), ledger=ledger)
    assert ledger.used("GPU-0") == 0


def test_touching_released_weights_answers_and_then_kills() -> None:
    """The checker's 400 for released weights is the last word of a poisoned process."""

    async def main() -> None:
        client = Client()
        await client.post(RELEASE, {"tags": ["weights"]})
        assert await client.post("/weights_checker", {"action": "checksum"}) == 400
        await asyncio.sleep(6)
        assert not client.truth.alive
        with pytest.raises(NotSent):
            await client.get("/model_info")

    run(main())


def test_death_cuts_everything_open_and_nothing_comes_after() -> None:
    """Every open call is cut at the same moment, about 5 s after the fault; later ones are refused."""

    async def main() -> None:
        client = Client(timings=timings(decode_s=(1.0, 1.0)))
        loop = asyncio.get_running_loop()
        causes: list[str] = []
        client.server.on_death(causes.append)
        tasks = [asyncio.create_task(client.generate(100)) for _ in range(3)]
        tasks.append(asyncio.create_task(client.post("/flush_cache?timeout=100")))
        await asyncio.sleep(1)
        tasks.append(asyncio.create_task(client.post(RELEASE)))
        await asyncio.sleep(1)
        assert (await client.get("/model_info"))["weight_version"] == "default"
        tasks.append(asyncio.create_task(client.post("/flush_cache")))
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert loop.time() == pytest.approx(6.0, abs=0.2)
        assert [type(each) for each in ended] == [AnswerLost] * 6
        assert causes == [client.truth.death]
        with pytest.raises(NotSent):
            await client.post("/flush_cache")

    run(main())


def test_a_client_that_gives_up_does_not_stop_a_control_call() -> None:
    """A release whose client timed out is carried out all the same."""

    async def main() -> None:
        client = Client(timings=timings(release_s=(1.0, 1.0)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.post(RELEASE)
        assert client.truth.resident == ALL_TAGS
        await asyncio.sleep(1)
        assert client.truth.resident == {Tag.CUDA_GRAPH}

    run(main())


def test_a_restart_is_a_new_incarnation_with_old_weights() -> None:
    """After boot the server is as at its first start: start-up weights and version, nothing released."""

    async def main() -> None:
        client = Client(timings=timings(boot_s=(60.0, 60.0), warmup_s=(2.0, 2.0)))
        opened = []
        client.server.on_open(lambda: opened.append(asyncio.get_running_loop().time()))
        await client.push("$seed1", weight_version="v1")
        client.server.kill("power cut")
        client.server.kill("again")
        assert client.truth.death == "power cut"
        assert client.server.restart()
        with pytest.raises(RuntimeError, match="alive"):
            client.server.restart()
        with pytest.raises(NotSent, match="starting"):
            await client.get("/model_info")
        await asyncio.sleep(60)
        assert opened == [60.0]
        assert (await client.get("/model_info"))["weight_version"] == "default"
        assert (client.truth.weights_digest(), client.truth.incarnation) == (SEED0, 2)
        assert (await client.call("GET", "/health")).status == 503
        await asyncio.sleep(2.5)
        assert (await client.call("GET", "/health")).status == 200

    run(main())


@pytest.mark.parametrize("skip", [False, True])
def test_a_release_during_the_warm_up_kills(skip: bool) -> None:
    """The warm-up is a running request; without it a release right after boot is harmless."""

    async def main() -> None:
        client = Client(skip_warmup=skip, timings=timings(warmup_s=(2.0, 2.0)))
        client.server.kill()
        client.server.restart()
        await asyncio.sleep(1)
        if skip:
            assert await client.post(RELEASE) == 200
        else:
            with pytest.raises(AnswerLost, match="only when server is idle"):
                await client.post(RELEASE)

    run(main())


async def _trace(seed: int) -> list[object]:
    server = SimServer(SimConfig(timings=Timings()), chooser=SeededChooser(seed))
    transport = SimTransport(server)
    loop = asyncio.get_running_loop()
    seen: list[object] = []

    async def generate(number: int) -> None:
        body = json.dumps({"input_ids": [number, 2, 3], "sampling_params": {"max_new_tokens": 9}}).encode()
        reply = await transport.request("POST", "/generate", body)
        seen.append((loop.time(), reply.body))

    await asyncio.gather(*(generate(number) for number in range(5)))
    for path, body in (("/pause_generation", b"{}"), (RELEASE, b"{}"), (RESUME, b"{}"), (RESUME, b"{}")):
        try:
            seen.append((loop.time(), await transport.request("POST", path, body)))
        except AnswerLost as error:
            seen.append((loop.time(), str(error)))
    return seen


def test_a_run_is_its_choices() -> None:
    """The same seed is the same run, to the byte and the nanosecond; another seed is another run."""
    assert run(_trace(1)) == run(_trace(1))
    assert run(_trace(1)) != run(_trace(2))
