"""What a request is answered."""

import json

from refitfsm.sim.conformance.expect import NotHere, expect, listing, mapping, same
from refitfsm.sim.conformance.registry import Area, check
from refitfsm.sim.conformance.subject import PROMPT, TOKENS, Answer, Subject, asking

_META = (
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "num_retractions",
    "e2e_latency",
)


@check(Area.GENERATION)
async def an_answer_has_tokens_and_facts(subject: Subject) -> None:
    """An answer has the tokens asked for, why it ended, and what it cost."""
    answer = await subject.generate()
    same(len(answer.tokens), TOKENS, "the number of tokens")
    for key in _META:
        expect(key in answer.meta, f"{key} is not there")
    same(answer.meta["finish_reason"], {"type": "length", "length": TOKENS}, "the finish reason")
    same(answer.meta["prompt_tokens"], len(PROMPT), "prompt_tokens")
    same(answer.meta["completion_tokens"], TOKENS, "completion_tokens")
    same(answer.meta["num_retractions"], 0, "num_retractions")


@check(Area.GENERATION)
async def greedy_answers_repeat(subject: Subject) -> None:
    """The same prompt and weights give the same tokens, from a cold cache and from a warm one."""
    first = await subject.tokens()
    same(await subject.tokens(), first, "the answer from a warm cache")
    await subject.idle()
    same(await subject.tokens(), first, "the answer from a cold cache")


@check(Area.GENERATION)
async def a_flush_empties_the_prefix_cache(subject: Subject) -> None:
    """A prompt asked before is found in the cache, and not after a flush."""
    await subject.generate()
    same((await subject.generate()).meta["cached_tokens"], len(PROMPT) - 1, "cached_tokens")
    await subject.idle()
    same((await subject.generate()).meta["cached_tokens"], 0, "cached_tokens after a flush")


@check(Area.GENERATION)
async def a_batch_is_answered_in_order(subject: Subject) -> None:
    """A list of prompts is answered by a list, each as if it had been asked alone."""
    prompts = [[1, 2], list(PROMPT)]
    answer = await subject.well("/generate", asking(input_ids=prompts))
    both = [Answer(200, each).tokens for each in listing(answer.value)]
    alone = [(await subject.well("/generate", asking(input_ids=prompt))).tokens for prompt in prompts]
    same(both, alone, "the answers")


@check(Area.GENERATION)
async def a_batch_of_one_is_a_list(subject: Subject) -> None:
    """A list with one prompt is answered by a list with one answer."""
    answer = await subject.well("/generate", asking(input_ids=[list(PROMPT)]))
    same(len(listing(answer.value)), 1, "the number of answers")


@check(Area.GENERATION)
async def several_samples_are_a_list(subject: Subject) -> None:
    """With n = 2 a prompt is answered twice, and greedily the same."""
    body = asking()
    body["sampling_params"] = {**mapping(body["sampling_params"]), "n": 2}
    answers = [Answer(200, each).tokens for each in listing((await subject.well("/generate", body)).value)]
    same(answers, [await subject.tokens()] * 2, "the answers")


@check(Area.GENERATION)
async def a_stream_ends_with_the_whole_answer(subject: Subject) -> None:
    """A streamed answer is a run of events with ever more tokens, then the end mark."""
    text = (await subject.reply("POST", "/generate", asking(stream=True))).body.decode()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    same(lines[-1], "[DONE]", "the last event")
    events = [Answer(200, json.loads(line)) for line in lines[:-1]]
    lengths = [len(event.tokens) for event in events]
    same(lengths, sorted(lengths), "the numbers of tokens")
    same(events[-1].finish, "length", "the finish reason of the last")
    same(events[-1].tokens, await subject.tokens(), "the last event's tokens")


@check(Area.GENERATION)
async def a_request_keeps_its_id(subject: Subject) -> None:
    """The id that a client gives is the answer's."""
    same((await subject.generate(rid="mine-1")).meta["id"], "mine-1", "the id")


@check(Area.GENERATION)
async def a_request_for_no_tokens_gets_none(subject: Subject) -> None:
    """Zero new tokens are an answer with none."""
    answer = await subject.generate(0)
    same(answer.tokens, [], "the tokens")
    same(answer.meta["finish_reason"], {"type": "length", "length": 0}, "the finish reason")


@check(Area.GENERATION)
async def log_probabilities_come_with_the_tokens(subject: Subject) -> None:
    """Where they are asked for, each token has its log probability."""
    answer = await subject.generate(return_logprob=True)
    pairs = [listing(each) for each in listing(answer.meta["output_token_logprobs"])]
    same([pair[1] for pair in pairs], answer.tokens, "the tokens of the log probabilities")
    expect(all(isinstance(pair[0], float) for pair in pairs), "one is no number")


@check(Area.GENERATION)
async def text_needs_a_tokenizer(subject: Subject) -> None:
    """A server that was started without a tokenizer refuses text."""
    if not (await subject.get("/server_info")).fields.get("skip_tokenizer_init"):
        raise NotHere("this server has a tokenizer")
    answer = await subject.post("/generate", {"text": "words", "sampling_params": {"max_new_tokens": 1}})
    same(answer.status, 400, "the status")
    expect("skip_tokenizer_init" in str(mapping(answer.fields["error"])["message"]), f"it said {answer}")


@check(Area.GENERATION)
async def a_prompt_longer_than_the_context_is_refused(subject: Subject) -> None:
    """The error names the lengths."""
    answer = await subject.post("/generate", asking(1, input_ids=[7] * 100_000))
    same(answer.status, 400, "the status")
    expect("100000 tokens" in str(mapping(answer.fields["error"])["message"]), f"it said {answer}")


@check(Area.GENERATION, since=(0, 5, 19))
async def versions_are_told_by_spans_of_tokens(subject: Subject) -> None:
    """From 0.5.19 on an answer says which tokens were made under which label."""
    answer = await subject.generate()
    span = {"version": answer.meta["weight_version"], "start": 0, "end": TOKENS}
    same(answer.meta["weight_versions"], [span], "the spans")


@check(Area.GENERATION, before=(0, 5, 19))
async def versions_are_told_once(subject: Subject) -> None:
    """Before 0.5.19 an answer has one label and no spans."""
    expect("weight_versions" not in (await subject.generate()).meta, "there are spans")
