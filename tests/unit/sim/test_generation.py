"""Generation: what answers are made of, and what the true record says about them."""

import asyncio
import json

import pytest

from refitfsm.drivers.transport import AnswerLost
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.loop import run
from refitfsm.sim.requests import Phase
from refitfsm.sim.truth import UNDEFINED

from .client import PROMPT, Client, timings

SEED0, SEED1 = digest_of(tiny_model(0)), digest_of(tiny_model(1))
STEP = timings(decode_s=(0.004, 0.004))


def test_the_same_weights_say_the_same_everywhere() -> None:
    """Servers of any release, rank count or speed that hold the same weights answer the same tokens."""

    async def main() -> None:
        answers = [
            await Client(**options).tokens()
            for options in (
                {},
                {"sglang_version": "0.5.12", "tp_size": 2},
                {"memory_saver": False, "timings": STEP},
                {"parameters": tiny_model(0)},
            )
        ]
        assert all(each == answers[0] for each in answers)
        assert await Client(parameters=tiny_model(1)).tokens() != answers[0]

    run(main())


def test_a_clean_answer_names_its_weights_and_nothing_else() -> None:
    """The record of an answer has the digest that made it, no foreign cache, and the version told."""

    async def main() -> None:
        client = Client()
        told = await client.generate(4)
        (answer,) = client.truth.answers
        assert [tuple(span) for span in answer.weights] == [(SEED0, 0, 4)]
        assert answer.kv_read == ()
        assert (answer.version, list(answer.tokens)) == ("default", told["output_ids"])

    run(main())


def test_a_stale_prefix_changes_the_answer_and_is_on_record() -> None:
    """A push without a flush keeps the old cache: the next answer is wrong, visibly and on record."""

    async def main() -> None:
        client = Client()
        await client.tokens()
        assert await client.push("$seed1", flush_cache=False) == 200
        stale = await client.generate()
        assert stale["meta_info"]["cached_tokens"] == len(PROMPT) - 1
        assert client.truth.answers[-1].kv_read == (SEED0,)
        assert await client.post("/flush_cache") == 200
        clean = await client.tokens()
        assert client.truth.answers[-1].kv_read == ()
        assert stale["output_ids"] != clean
        assert clean == await Client(parameters=tiny_model(1)).tokens()

    run(main())


def test_undefined_weights_say_one_token_and_are_on_record() -> None:
    """Resumed without backup and not pushed, the server answers 200 with one token for ever."""

    async def main() -> None:
        client = Client()
        await client.post("/release_memory_occupation")
        await client.post("/resume_memory_occupation")
        assert client.truth.weights_digest() is None
        assert set(await client.tokens()) == {0}
        assert client.truth.answers[-1].weights[0].label == UNDEFINED

    run(main())


def test_a_half_push_is_a_digest_that_nobody_published() -> None:
    """After some of the tensors the weights are neither the old nor the new ones."""

    async def main() -> None:
        client = Client()
        await client.push("$one tensor")
        assert client.truth.weights_digest() not in {SEED0, SEED1, None}

    run(main())


def test_a_retracted_request_is_on_record_with_both_weights() -> None:
    """Its first tokens are the old weights' and its last the new ones', over a recomputed cache."""

    async def main() -> None:
        client = Client(timings=STEP)
        running = asyncio.create_task(client.generate(20))
        await asyncio.sleep(0.0422)
        await client.post("/pause_generation", {"mode": "retract"})
        assert [each.phase for each in client.truth.waiting.values()] == [Phase.WAITING]
        assert await client.push("$seed1", weight_version="v1") == 200
        await client.post("/continue_generation")
        told = await running
        (answer,) = client.truth.answers
        assert [span.label for span in answer.weights] == [SEED0, SEED1]
        assert answer.kv_read == ()
        assert told["meta_info"]["weight_versions"] == [
            {"version": "default", "start": 0, "end": 10},
            {"version": "v1", "start": 10, "end": 20},
        ]

    run(main())


def test_an_in_place_request_reads_the_old_cache() -> None:
    """It keeps its KV over the push, and the record says whose."""

    async def main() -> None:
        client = Client(timings=STEP)
        running = asyncio.create_task(client.generate(20))
        await asyncio.sleep(0.042)
        await client.post("/pause_generation", {"mode": "in_place"})
        assert await client.push("$seed1", flush_cache=False) == 200
        await client.post("/continue_generation")
        await running
        assert client.truth.answers[-1].kv_read == (SEED0,)

    run(main())


def test_a_pause_costs_no_tokens() -> None:
    """However often a request is paused in place and continued, its tokens and its time in steps stay."""

    async def main() -> None:
        client = Client(timings=STEP)
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(client.generate(50))
        for _ in range(9):
            await asyncio.sleep(0.0151)
            await client.post("/pause_generation", {"mode": "in_place"})
            await client.post("/continue_generation")
        told = await running
        assert loop.time() == pytest.approx(50 * 0.004)
        assert told["output_ids"] == await Client().tokens(50)

    run(main())


def test_in_place_then_abort_never_ends() -> None:
    """The abort acts at the next step, which never comes: pause and continue hang, as in the real one."""

    async def main() -> None:
        client = Client(timings=STEP)
        running = asyncio.create_task(client.generate(500))
        await asyncio.sleep(0.1)
        await client.post("/pause_generation", {"mode": "in_place"})
        stuck = [asyncio.create_task(client.post("/pause_generation"))]
        await asyncio.sleep(5)
        stuck.append(asyncio.create_task(client.post("/continue_generation")))
        await asyncio.sleep(600)
        assert not any(task.done() for task in (running, *stuck))

    run(main())


def test_retract_then_abort_ends_the_queued() -> None:
    """A retracted request is in the queue, so an abort ends it at once, with the tokens it had."""

    async def main() -> None:
        client = Client(timings=STEP)
        running = asyncio.create_task(client.generate(500))
        await asyncio.sleep(0.1)
        await client.post("/pause_generation", {"mode": "retract"})
        await client.post("/pause_generation")
        told = await running
        assert told["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(told["output_ids"]) == 25

    run(main())


def test_requests_beyond_the_limit_wait() -> None:
    """No more than the configured number run; the others wait in order and are all answered."""

    async def main() -> None:
        client = Client(max_running_requests=2, timings=STEP)
        tasks = [asyncio.create_task(client.generate(10)) for _ in range(5)]
        await asyncio.sleep(0.01)
        assert (len(client.truth.running), len(client.truth.waiting)) == (2, 3)
        await asyncio.gather(*tasks)
        assert len(client.truth.answers) == 5
        assert client.truth.idle()

    run(main())


def test_an_abort_matches_by_prefix() -> None:
    """/abort_request ends the requests whose id begins with one that somebody has, and no other."""

    async def main() -> None:
        client = Client(timings=STEP)
        tasks = {rid: asyncio.create_task(client.generate(100, rid=rid)) for rid in ("a", "a-2", "b-1")}
        await asyncio.sleep(0.1)
        for rid in ("a", "b", ""):
            assert await client.post("/abort_request", {"rid": rid}) == 200
        reasons = {rid: (await task)["meta_info"]["finish_reason"]["type"] for rid, task in tasks.items()}
        assert reasons == {"a": "abort", "a-2": "abort", "b-1": "length"}

    run(main())


def test_a_stream_adds_up_to_the_whole_answer() -> None:
    """The events of a stream grow token by token and end as the plain answer does."""

    async def main() -> None:
        client = Client()
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True}
        events = (await client.call("POST", "/generate", body)).body.decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        outputs = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert [len(each["output_ids"]) for each in outputs] == [1, 2, 3, 4, 5]
        assert [each["meta_info"]["finish_reason"] is None for each in outputs] == [True] * 4 + [False]
        assert outputs[-1]["output_ids"] == await client.tokens(5)

    run(main())


def test_a_dropped_stream_leaves_only_the_scheduler_busy() -> None:
    """Its client gone, a pause returns at once although the request still runs: a release now kills."""

    async def main() -> None:
        client = Client(timings=timings(decode_s=(0.05, 0.05), death_s=(5.0, 5.0)))
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 500}, "stream": True}
        reading = asyncio.create_task(client.call("POST", "/generate", body))
        await asyncio.sleep(0.5)
        reading.cancel()
        await asyncio.sleep(0)
        client.server.engine.scheduler.abort = lambda _rid: None  # type: ignore[method-assign]
        started = asyncio.get_running_loop().time()
        await client.post("/pause_generation")
        assert asyncio.get_running_loop().time() == started
        assert not client.truth.idle()
        with pytest.raises(AnswerLost):
            await client.post("/release_memory_occupation")

    run(main())


def test_slow_down_lengthens_each_step() -> None:
    """/slow_down makes every later step longer by what it is told, and null takes it back."""

    async def main() -> None:
        client = Client(timings=STEP)
        await client.post("/slow_down", {"forward_sleep_time": 0.2})
        slow = (await client.generate(5))["meta_info"]["e2e_latency"]
        await client.post("/slow_down", {"forward_sleep_time": None})
        fast = (await client.generate(5))["meta_info"]["e2e_latency"]
        assert (slow, fast) == (pytest.approx(5 * 0.204), pytest.approx(5 * 0.004))

    run(main())


def test_a_batch_answers_in_order() -> None:
    """Prompts of one batch are answered in order, each as it would be alone."""

    async def main() -> None:
        client = Client()
        prompts = [[1, 2], [3, 4, 5], [1, 2]]
        told = await client.generate(4, prompts)  # type: ignore[arg-type]
        assert [each["output_ids"] for each in told] == [
            await Client().tokens(4, prompt) for prompt in prompts
        ]

    run(main())


def test_text_is_taken_where_there_is_a_tokenizer() -> None:
    """Text becomes tokens and comes back as text, but not on a server without a tokenizer."""

    async def main() -> None:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 3}}
        told = json.loads((await Client().call("POST", "/generate", body)).body)
        assert told["meta_info"]["prompt_tokens"] == 5
        assert told["text"].count(" t") == 3
        assert (await Client(skip_tokenizer_init=True).call("POST", "/generate", body)).status == 400

    run(main())
