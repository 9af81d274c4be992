"""What the driver and the controller take for granted of a server, as checks that need no test runner.

The same checks run on the simulator in process, on the simulator over HTTP, and on real servers on CPU
and GPU. Where a simulator and a real server differ, the simulator is wrong.

A check gets a `Subject` that serves the weights of `source(0)` with its gate open, and leaves it so. A
lethal check gets one of its own, and leaves it dead.
"""

import asyncio
import base64
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from refitfsm.drivers.base import Observation
from refitfsm.drivers.sglang import Load, SGLangDriver, encode_inline
from refitfsm.drivers.transport import AnswerLost, NotSent, Reply, Transport
from refitfsm.errors import RequestFailed
from refitfsm.model.records import Issued
from refitfsm.model.states import Tag
from refitfsm.model.values import Capabilities, Command, CommandKind, EventName, VerifyLevel
from refitfsm.weights.source import WeightSource

RUN = "conformance"
PROMPT = [5, 6, 7]
TOKENS = 8
LONG_TOKENS = 300
RUNNING_S = 0.15
"""After this a long request is running on any server here."""
WAIT_S = 60.0


@dataclass
class Subject:
    """A server under test, and hands to work it with."""

    transport: Transport
    source: Callable[[int], WeightSource]
    """Weights that fit: 0 is what the server started with, 1 is other."""
    chunk_bytes_max: int = 200_000
    capabilities: Capabilities = field(default_factory=Capabilities)
    seq: int = 0
    driver: SGLangDriver = field(init=False)

    def __post_init__(self) -> None:
        self.driver = SGLangDriver(self.transport, RUN, encode=encode_inline)

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.capabilities.sglang_version.split(".")[:3])

    async def do(self, kind: CommandKind, *, wait_s: float = WAIT_S, **fields: object) -> Observation:
        """Carry out one command."""
        self.seq += 1
        command = Command(kind, **fields)  # type: ignore[arg-type]
        deadline_s = asyncio.get_running_loop().time() + wait_s
        return await self.driver.execute(Issued("subject", 1, self.seq, command, deadline_s))

    async def ok(self, kind: CommandKind, **fields: object) -> Observation:
        """Carry out one command that must end well."""
        observation = await self.do(kind, **fields)
        assert observation.event not in _BAD, (kind, observation)
        return observation

    async def enrol(self) -> None:
        self.capabilities = (await self.ok(CommandKind.ENROL)).report.capabilities

    async def post(self, path: str, body: object = None) -> Reply:
        async with asyncio.timeout(WAIT_S):
            return await self.transport.request("POST", path, msgspec.json.encode(body))

    async def greedy(self, count: int = TOKENS, prompt: list[int] | None = None) -> dict[str, object]:
        """The answer to a prompt, whole."""
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": prompt or PROMPT, "sampling_params": params}
        answer = await self.driver.generate(msgspec.json.encode(body), WAIT_S)
        decoded: dict[str, object] = msgspec.json.decode(answer)
        return decoded

    async def tokens(self) -> object:
        return (await self.greedy())["output_ids"]

    async def push(self, seed: int, version: int, *, session: bool = True) -> None:
        """Put whole weights in place, as a cycle does."""
        load = Load(self.source(seed), self.source(seed).chunks(self.chunk_bytes_max))
        self.driver.load = load
        inside = session and self.capabilities.sessions
        if inside:
            await self.ok(CommandKind.BEGIN)
        for chunk in load.chunks:
            await self.ok(CommandKind.PUSH, version=version, chunk=chunk.index, chunks=chunk.count)
        if inside:
            await self.ok(CommandKind.END)

    async def quiet(self) -> None:
        await self.ok(CommandKind.PAUSE)
        await self.ok(CommandKind.FLUSH)

    async def restore(self, version: int) -> None:
        """Back to the start-up weights and open."""
        await self.push(0, version)
        await self.ok(CommandKind.FLUSH)
        await self.ok(CommandKind.CONTINUE)


_BAD = (EventName.REFUSED, EventName.FAILED, EventName.LOST, EventName.DIED)

Check = Callable[[Subject], Awaitable[None]]
CHECKS: list[Check] = []
LETHAL: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def lethal(function: Check) -> Check:
    LETHAL.append(function)
    return function


@check
async def enrolment_reads_the_server_and_stamps_it(subject: Subject) -> None:
    """Enrolling reads the dialect, and leaves a label by which the process is known again."""
    await subject.enrol()
    found = subject.capabilities
    assert found.sessions is (subject.version >= (0, 5, 21))
    assert found.tp_size >= 1
    assert found.model_path
    answer = await subject.greedy()
    meta = answer["meta_info"]
    assert isinstance(meta, dict)
    assert meta["weight_version"] == f"refitfsm:{RUN}:0"


@check
async def pause_flush_and_continue_may_be_repeated(subject: Subject) -> None:
    """Each of the three ends well twice in a row, and the answers are the same after."""
    await subject.enrol()
    before = await subject.tokens()
    for kind in (CommandKind.PAUSE, CommandKind.FLUSH, CommandKind.CONTINUE):
        await subject.ok(kind)
        await subject.ok(kind)
    assert await subject.tokens() == before


@check
async def a_flush_is_refused_while_a_request_runs(subject: Subject) -> None:
    """A busy server refuses the flush, and the driver gives up before its deadline with its words."""
    await subject.enrol()
    request = asyncio.create_task(subject.greedy(LONG_TOKENS))
    await asyncio.sleep(RUNNING_S)
    observation = await subject.do(CommandKind.FLUSH, wait_s=1.1)
    assert observation.event is EventName.REFUSED, observation
    assert observation.detail.startswith("400")
    await request
    await subject.ok(CommandKind.FLUSH)


@check
async def a_pause_answers_running_requests_with_what_they_have(subject: Subject) -> None:
    """Pausing ends a running request with the finish reason abort and its tokens so far."""
    await subject.enrol()
    request = asyncio.create_task(subject.greedy(LONG_TOKENS))
    await asyncio.sleep(RUNNING_S)
    await subject.ok(CommandKind.PAUSE)
    answer = await request
    meta, tokens = answer["meta_info"], answer["output_ids"]
    assert isinstance(meta, dict)
    assert isinstance(tokens, list)
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(tokens) < LONG_TOKENS
    await subject.ok(CommandKind.FLUSH)
    await subject.ok(CommandKind.CONTINUE)


@check
async def a_paused_server_holds_requests(subject: Subject) -> None:
    """A request to a paused server waits for the continue and is answered then."""
    await subject.enrol()
    await subject.quiet()
    held = asyncio.create_task(subject.greedy())
    await asyncio.sleep(RUNNING_S)
    assert not held.done()
    await subject.ok(CommandKind.CONTINUE)
    assert (await held)["output_ids"] == await subject.tokens()


@check
async def a_push_in_chunks_changes_the_answers_and_back(subject: Subject) -> None:
    """New weights answer otherwise, the version reads back, and the old weights answer as before."""
    await subject.enrol()
    before = await subject.tokens()
    await subject.quiet()
    await subject.push(1, 1)
    assert (await subject.ok(CommandKind.VERIFY, version=1)).report.version == 1
    await subject.ok(CommandKind.FLUSH)
    await subject.ok(CommandKind.CONTINUE)
    assert await subject.tokens() != before
    await subject.quiet()
    await subject.restore(2)
    assert await subject.tokens() == before


@check
async def the_checksum_follows_the_weights(subject: Subject) -> None:
    """The checksum changes with the weights and comes back with them, where the server can make one."""
    await subject.enrol()
    first = await subject.do(CommandKind.VERIFY, level=VerifyLevel.CHECKSUM)
    if first.event is EventName.REFUSED:
        assert "checksum" in first.detail  # 0.5.16 on CPU cannot
        return
    await subject.quiet()
    await subject.push(1, 1)
    second = await subject.ok(CommandKind.VERIFY, level=VerifyLevel.CHECKSUM)
    await subject.push(0, 2)
    third = await subject.ok(CommandKind.VERIFY, level=VerifyLevel.CHECKSUM)
    assert first.report.checksum
    assert first.report.checksum == third.report.checksum != second.report.checksum
    await subject.ok(CommandKind.FLUSH)
    await subject.ok(CommandKind.CONTINUE)


@check
async def a_second_session_is_refused_and_known_as_open(subject: Subject) -> None:
    """Begin while a session is open is refused, and told apart from other refusals; end closes it once."""
    await subject.enrol()
    if not subject.capabilities.sessions:
        observation = await subject.do(CommandKind.BEGIN)
        assert observation.event is EventName.REFUSED, observation
        assert "404" in observation.detail
        return
    await subject.quiet()
    await subject.ok(CommandKind.BEGIN)
    observation = await subject.do(CommandKind.BEGIN)
    assert observation.event is EventName.REFUSED, observation
    assert observation.report.session_open
    await subject.ok(CommandKind.END)
    assert (await subject.do(CommandKind.END)).event is EventName.REFUSED
    await subject.restore(1)


@check
async def a_push_without_its_session_is_refused_and_changes_nothing(subject: Subject) -> None:
    """Where sessions exist, a push outside one is refused before its payload is looked at."""
    await subject.enrol()
    if not subject.capabilities.sessions:
        return
    before = await subject.tokens()
    await subject.quiet()
    load = Load(subject.source(1), subject.source(1).chunks(subject.chunk_bytes_max))
    subject.driver.load = load
    observation = await subject.do(CommandKind.PUSH, version=1, chunk=0, chunks=len(load.chunks))
    assert observation.event is EventName.REFUSED, observation
    await subject.ok(CommandKind.CONTINUE)
    assert await subject.tokens() == before


@check
async def a_tensor_of_an_unknown_name_is_taken_in_silence(subject: Subject) -> None:
    """The server says success and changes nothing: only a manifest can find this."""
    await subject.enrol()
    before = await subject.tokens()
    if subject.capabilities.sessions:
        await subject.quiet()
        await subject.ok(CommandKind.BEGIN)
    reply = await subject.post("/update_weights_from_tensor", _renamed(subject, "model.nope.weight"))
    assert (reply.status, msgspec.json.decode(reply.body)["success"]) == (200, True)
    if subject.capabilities.sessions:
        await subject.ok(CommandKind.END)
        await subject.ok(CommandKind.CONTINUE)
    assert await subject.tokens() == before


@check
async def another_process_at_the_address_is_found(subject: Subject) -> None:
    """A label that is not ours means that another process answers, before anything is done to it."""
    await subject.enrol()
    await subject.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    for kind in (CommandKind.PAUSE, CommandKind.RELEASE, CommandKind.RESUME, CommandKind.CONTINUE):
        observation = await subject.do(kind, tags=frozenset({Tag.WEIGHTS}))
        assert observation.event is EventName.DIED, (kind, observation)
        assert "another process" in observation.detail
    await subject.enrol()
    await subject.tokens()


@check
async def a_bad_request_is_an_error_with_the_servers_words(subject: Subject) -> None:
    """A prompt that is too long is answered with an error, and the server lives."""
    await subject.enrol()
    try:
        await subject.greedy(prompt=[7] * 5000)
    except RequestFailed as error:
        assert "400" in str(error)  # noqa: PT017 - no test runner here
    else:
        raise AssertionError("a prompt of 5,000 tokens was answered")
    await subject.tokens()


@check
async def a_colocated_cycle_is_right_and_strangers_wait(subject: Subject) -> None:
    """Release everything, resume in stages around a push: the answers are the new weights'.

    A stranger's request that came while the server was released waits, and is answered by them too.
    """
    await subject.enrol()
    if not subject.capabilities.memory_saver:
        return
    before = await subject.tokens()
    await subject.quiet()
    await subject.ok(CommandKind.RELEASE, tags=frozenset(Tag))
    stranger = asyncio.create_task(subject.greedy())
    await asyncio.sleep(RUNNING_S)
    await subject.ok(CommandKind.RESUME, tags=frozenset({Tag.WEIGHTS}))
    await subject.push(1, 1)
    await subject.ok(CommandKind.RESUME, tags=frozenset({Tag.KV_CACHE, Tag.CUDA_GRAPH}))
    await subject.ok(CommandKind.FLUSH)
    await subject.ok(CommandKind.CONTINUE)
    after = await subject.tokens()
    assert after != before
    assert (await stranger)["output_ids"] == after
    await subject.quiet()
    await subject.restore(2)
    assert await subject.tokens() == before


@check
async def a_paused_server_is_not_taken_over(subject: Subject) -> None:
    """Where the server can tell (0.5.20 and later), enrolling a paused one says so."""
    await subject.enrol()
    if subject.version < (0, 5, 20):
        return
    await subject.quiet()
    other = Subject(subject.transport, subject.source)
    observation = await other.do(CommandKind.ENROL, wait_s=7.0)
    assert observation.event is EventName.ENROLLED, observation
    assert observation.report.paused
    await subject.ok(CommandKind.CONTINUE)


def _renamed(subject: Subject, name: str, shape: tuple[int, ...] = (4,)) -> dict[str, object]:
    """A push of one small tensor, for every rank."""
    entry = subject_payload(name, shape)
    return {"serialized_named_tensors": [entry] * subject.capabilities.tp_size, "flush_cache": False}


def subject_payload(name: str, shape: tuple[int, ...]) -> str:
    """One tensor of zeros under a name, as a payload."""
    from refitfsm.weights.manifest import TensorSpec  # noqa: PLC0415
    from refitfsm.weights.payload import cpu_payload  # noqa: PLC0415

    spec = TensorSpec.of(name, "F32", shape)
    return cpu_payload([(spec, bytes(spec.nbytes))]).decode()


async def _dies(subject: Subject, work: Awaitable[Observation]) -> None:
    """The command kills the server, and the driver sees it."""
    observation = await work
    assert observation.event is EventName.DIED, observation
    try:
        await subject.transport.request("GET", "/model_info")
    except (NotSent, AnswerLost):
        return
    raise AssertionError("the server still answers")


@lethal
async def a_resume_of_what_is_resident_kills(subject: Subject) -> None:
    """Resume with nothing released."""
    await subject.enrol()
    await _dies(subject, subject.do(CommandKind.RESUME, tags=frozenset({Tag.WEIGHTS})))


@lethal
async def a_release_while_a_request_runs_kills(subject: Subject) -> None:
    """Release under load, and the request is lost with the server."""
    await subject.enrol()
    request = asyncio.create_task(subject.greedy(LONG_TOKENS))
    await asyncio.sleep(RUNNING_S)
    await _dies(subject, subject.do(CommandKind.RELEASE, tags=frozenset({Tag.KV_CACHE})))
    result = (await asyncio.gather(request, return_exceptions=True))[0]
    assert isinstance(result, RequestFailed), result


@lethal
async def a_push_of_a_wrong_shape_kills(subject: Subject) -> None:
    """A known tensor of another shape."""
    await subject.enrol()
    await subject.quiet()
    if subject.capabilities.sessions:
        await subject.ok(CommandKind.BEGIN)

    async def push() -> Observation:
        name = subject.source(0).manifest.tensors[-1].name
        try:
            reply = await subject.post("/update_weights_from_tensor", _renamed(subject, name, (3,)))
        except AnswerLost as error:
            return Observation(EventName.DIED, str(error))
        return Observation(EventName.FAILED, f"{reply}")

    await _dies(subject, push())


@lethal
async def a_short_list_of_payloads_kills(subject: Subject) -> None:
    """Fewer payloads than tensor parallel ranks."""
    await subject.enrol()
    await subject.quiet()
    if subject.capabilities.sessions:
        await subject.ok(CommandKind.BEGIN)

    async def push() -> Observation:
        try:
            reply = await subject.post("/update_weights_from_tensor", {"serialized_named_tensors": []})
        except AnswerLost as error:
            return Observation(EventName.DIED, str(error))
        return Observation(EventName.FAILED, f"{reply}")

    await _dies(subject, push())


@lethal
async def a_payload_off_the_allow_list_kills(subject: Subject) -> None:
    """A pickle that names a function SGLang does not allow."""
    await subject.enrol()
    await subject.quiet()
    if subject.capabilities.sessions:
        await subject.ok(CommandKind.BEGIN)
    entry = base64.b64encode(pickle.dumps(base64.b64decode, protocol=4)).decode()

    async def push() -> Observation:
        body = {"serialized_named_tensors": [entry] * subject.capabilities.tp_size}
        try:
            reply = await subject.post("/update_weights_from_tensor", body)
        except AnswerLost as error:
            return Observation(EventName.DIED, str(error))
        return Observation(EventName.FAILED, f"{reply}")

    await _dies(subject, push())


@lethal
async def a_second_release_kills_with_the_memory_saver(subject: Subject) -> None:
    """Release of what is released."""
    await subject.enrol()
    await subject.quiet()
    await subject.ok(CommandKind.RELEASE, tags=frozenset({Tag.KV_CACHE}))
    await _dies(subject, subject.do(CommandKind.RELEASE, tags=frozenset({Tag.KV_CACHE})))
