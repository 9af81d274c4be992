"""/generate: from a body to requests, and from finished requests to what SGLang answers."""

import asyncio
from collections.abc import Callable, Sequence

from refitfsm.sim.bodies import Generate, Sampling, decode
from refitfsm.sim.engine import Engine
from refitfsm.sim.requests import Answer, Job, Request
from refitfsm.sim.wire import HttpReply, HttpRequest, error_reply, json_reply


def parse(engine: Engine, request: HttpRequest) -> Job | HttpReply:
    """The job that a body asks for, or what is wrong with it."""
    body = decode(request, Generate)
    if isinstance(body, HttpReply):
        if engine.profile.generate_schema_gate and request.body and request.is_json:
            return json_reply({"error": "the body does not fit the schema of /generate"}, 400)
        return body
    prompts = _prompts(engine, body)
    if isinstance(prompts, HttpReply):
        return prompts
    batch = isinstance(body.text, list) or (
        body.input_ids is not None and bool(body.input_ids) and isinstance(body.input_ids[0], list)
    )
    sampling = _sampling(body, len(prompts))
    rids = body.rid if isinstance(body.rid, list) else [body.rid] if body.rid and len(prompts) == 1 else []
    if sampling is None or (rids and len(rids) != len(prompts)):
        return error_reply("The length of sampling_params and rid must be the batch size.")
    requests: list[Request] = []
    for at, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        wrong = _wrong(engine, prompt, params, batch=batch)
        if wrong is not None:
            return error_reply(wrong)
        for copy in range(params.n):
            rid = rids[at] if rids and copy == 0 else engine.new_rid()
            room = engine.config.context_length - len(prompt)
            requests.append(
                Request(rid, prompt, room if params.max_new_tokens is None else params.max_new_tokens)
            )
    many = batch or len(requests) > len(prompts)
    now = asyncio.get_running_loop().time()
    return Job(requests, many, bool(body.return_logprob), body.stream, started_s=now)


def _prompts(engine: Engine, body: Generate) -> list[tuple[int, ...]] | HttpReply:
    if body.input_ids is not None:
        if body.input_ids and all(isinstance(each, list) for each in body.input_ids):
            return [tuple(each) for each in body.input_ids if isinstance(each, list)]
        if any(isinstance(each, list) for each in body.input_ids):
            return error_reply("input_ids is a list of token ids or a list of such lists.")
        return [tuple(each for each in body.input_ids if isinstance(each, int))]
    if body.text is None:
        return error_reply("Either text, input_ids or input_embeds should be provided.")
    if engine.config.skip_tokenizer_init:
        return error_reply("A server started with skip_tokenizer_init=True cannot accept text prompts.")
    texts = body.text if isinstance(body.text, list) else [body.text]
    return [tuple(byte % engine.config.vocab_size for byte in text.encode()) for text in texts]


def _sampling(body: Generate, count: int) -> list[Sampling] | None:
    """Sampling parameters for each prompt, or None where their number is wrong."""
    if isinstance(body.sampling_params, list):
        return body.sampling_params if len(body.sampling_params) == count else None
    return [body.sampling_params or Sampling()] * count


def _wrong(engine: Engine, prompt: tuple[int, ...], params: Sampling, *, batch: bool) -> str | None:
    """Why the front end refuses a request; a token outside the vocabulary is not its business.

    Nor is an empty prompt in a list of them.
    """
    limit = engine.config.context_length
    if not prompt and not batch:
        return "input_ids cannot be empty."
    if len(prompt) >= limit:
        return f"The input ({len(prompt)} tokens) is longer than the model's context length ({limit} tokens)."
    wanted = params.max_new_tokens
    if wanted is not None and wanted < 0:
        return f"max_new_tokens must be at least 0, got {wanted}."
    if wanted is not None and len(prompt) + wanted > limit:
        return (
            f"Requested token count exceeds the model's maximum context length of {limit} tokens: "
            f"{len(prompt)} of input and {wanted} new."
        )
    return None


async def generate(engine: Engine, job: Job) -> HttpReply:
    """Run a job to its end and answer all of it."""
    answers = await engine.submit(job)
    bodies = [_output(engine, job, request, answer) for request, answer in _pairs(job, answers)]
    return json_reply(bodies if job.batch else bodies[0])


async def stream(engine: Engine, job: Job, put: Callable[[dict[str, object]], None]) -> None:
    """Run a job and put its outputs so far after every token, then the last ones."""

    def emit(request: Request) -> None:
        if len(request.tokens) < request.max_new_tokens:
            put(_output(engine, job, request, None))

    for request, answer in _pairs(job, await engine.submit(job, emit)):
        put(_output(engine, job, request, answer))


def _pairs(job: Job, answers: list[Answer]) -> list[tuple[Request, Answer]]:
    return list(zip(job.requests, answers, strict=True))


def _output(engine: Engine, job: Job, request: Request, answer: Answer | None) -> dict[str, object]:
    """One element of an answer; `answer` is None while it goes on."""
    tokens = list(request.tokens)
    meta: dict[str, object] = {
        "id": request.rid,
        "finish_reason": _finish(request, answer),
        "prompt_tokens": len(request.prompt),
        "weight_version": answer.version if answer else engine.truth.version_front,
        "num_retractions": request.retractions,
        "completion_tokens": len(tokens),
        "cached_tokens": request.cached_tokens,
        "e2e_latency": asyncio.get_running_loop().time() - job.started_s,
    }
    if engine.profile.version_spans:
        meta["weight_versions"] = [
            {"version": span.label, "start": span.start, "end": span.end} for span in request.versions
        ]
    if job.logprobs:
        meta["output_token_logprobs"] = [
            [_logprob(token, at), token, None] for at, token in enumerate(tokens)
        ]
    output: dict[str, object] = {} if engine.config.skip_tokenizer_init else {"text": _text(tokens)}
    output["output_ids"] = tokens
    output["meta_info"] = meta
    if len(job.requests) > 1 and job.stream:
        output["index"] = next(at for at, each in enumerate(job.requests) if each is request)
    return output


def _finish(request: Request, answer: Answer | None) -> dict[str, object] | None:
    if answer is None:
        return None
    if answer.aborted:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return {"type": "length", "length": request.max_new_tokens}


def _text(tokens: Sequence[int]) -> str:
    return "".join([f" t{token}" for token in tokens])


def _logprob(token: int, at: int) -> float:
    """A plausible figure that depends on nothing but the token and its place."""
    return -6.0 - ((token * 31 + at * 7) % 1000) / 1000
