"""A server under test, and hands to work it with: the driver's commands, and plain HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from refitfsm.drivers.base import Observation
from refitfsm.drivers.push import Load, inline
from refitfsm.drivers.sglang import SGLangDriver
from refitfsm.drivers.transport import AnswerLost, NotSent, Reply, Transport, Unreachable
from refitfsm.model.records import Issued
from refitfsm.model.states import Tag
from refitfsm.model.values import Capabilities, Command, CommandKind, EventName
from refitfsm.sim.conformance.expect import Broken, expect, listing, mapping
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.plan import PushWish
from refitfsm.weights.source import WeightSource

RUN = "conformance"
PROMPT = (5, 6, 7)
TOKENS = 8
LONG_TOKENS = 300
HELD_S = 0.15
"""A request that is held is not answered within this; one that is not held would be."""
POLL_S = 0.01
WAIT_S = 60.0
STEP_S = 0.03
"""How much longer each step takes while `slowly` is on."""
ENDLESS_TOKENS = 800
"""With `slowly` on, more than any check has patience for."""

CHUNK_BYTES_MAX = 200_000
"""Cuts the weights of a tiny model into a few chunks."""

_BAD = (EventName.REFUSED, EventName.FAILED, EventName.LOST, EventName.DIED)


class Answer(NamedTuple):
    """An HTTP answer, decoded."""

    status: int
    value: object
    """JSON as plain data, or the text where it is none."""

    @property
    def fields(self) -> Mapping[str, object]:
        return mapping(self.value)

    @property
    def meta(self) -> Mapping[str, object]:
        return mapping(self.fields["meta_info"])

    @property
    def finish(self) -> object:
        """Why a generation ended."""
        return mapping(self.meta["finish_reason"])["type"]

    @property
    def tokens(self) -> list[object]:
        return listing(self.fields["output_ids"])


@dataclass
class Subject:
    """A server under test, and hands to work it with."""

    transport: Transport
    source: Callable[[int], WeightSource]
    """Weights that fit: 0 is what the server started with, 1 is other."""
    chunk_bytes_max: int = CHUNK_BYTES_MAX
    capabilities: Capabilities = field(default_factory=Capabilities)
    seq: int = 0
    own_tokens: tuple[object, ...] = ()
    """What it answers with the weights that it started with, once that was asked."""
    driver: SGLangDriver = field(init=False)

    def __post_init__(self) -> None:
        self.driver = SGLangDriver(self.transport, RUN, aside=inline)

    @property
    def sessions(self) -> bool:
        return self.capabilities.sessions

    # --- the driver's commands --------------------------------------------------------------------

    async def do(self, kind: CommandKind, *, wait_s: float = WAIT_S, **fields: object) -> Observation:
        """Carry out one command."""
        self.seq += 1
        command = Command(kind, **fields)  # type: ignore[arg-type]
        deadline_s = asyncio.get_running_loop().time() + wait_s
        return await self.driver.execute(Issued("subject", 1, self.seq, command, deadline_s))

    async def ok(self, kind: CommandKind, *, wait_s: float = WAIT_S, **fields: object) -> Observation:
        """Carry out one command that must end well."""
        observation = await self.do(kind, wait_s=wait_s, **fields)
        expect(observation.event not in _BAD, f"{kind} ended as {observation}")
        return observation

    async def refused(self, kind: CommandKind, *, wait_s: float = WAIT_S, **fields: object) -> Observation:
        """Carry out one command that must be refused."""
        observation = await self.do(kind, wait_s=wait_s, **fields)
        expect(observation.event is EventName.REFUSED, f"{kind} ended as {observation}")
        return observation

    async def enrol(self) -> None:
        self.capabilities = (await self.ok(CommandKind.ENROL)).report.capabilities

    async def quiet(self) -> None:
        await self.ok(CommandKind.PAUSE)
        await self.ok(CommandKind.FLUSH)

    async def go_on(self) -> None:
        await self.ok(CommandKind.FLUSH)
        await self.ok(CommandKind.CONTINUE)

    def load(self, seed: int) -> Load:
        source = self.source(seed)
        return Load(source, source.plan(PushWish(chunk_bytes_max=self.chunk_bytes_max)).chunks)

    async def push(self, seed: int, version: int) -> None:
        """Put whole weights in place, as a cycle does."""
        load = self.load(seed)
        self.driver.load = load
        if self.sessions:
            await self.ok(CommandKind.BEGIN)
        for chunk in load.chunks:
            await self.ok(CommandKind.PUSH, version=version, chunk=chunk.index, chunks=chunk.count)
        if self.sessions:
            await self.ok(CommandKind.END)

    async def restore(self, version: int) -> None:
        """Back to the start-up weights and open."""
        await self.push(0, version)
        await self.go_on()

    async def resume_all(self) -> None:
        """Take back everything that `release_all` gave away, and the weights' content."""
        await self.ok(CommandKind.RESUME, tags=frozenset({Tag.WEIGHTS}))
        await self.push(0, 9)
        await self.ok(CommandKind.RESUME, tags=frozenset({Tag.KV_CACHE, Tag.CUDA_GRAPH}))
        await self.go_on()

    # --- plain HTTP -------------------------------------------------------------------------------

    async def reply(self, method: str, path: str, body: object = msgspec.UNSET) -> Reply:
        """One call; no body unless one is given, and bytes as they are."""
        data = body if isinstance(body, bytes) or body is msgspec.UNSET else msgspec.json.encode(body)
        async with asyncio.timeout(WAIT_S):
            return await self.transport.request(method, path, data if isinstance(data, bytes) else None)

    async def get(self, path: str) -> Answer:
        return _decoded(await self.reply("GET", path))

    async def post(self, path: str, body: object = msgspec.UNSET) -> Answer:
        return _decoded(await self.reply("POST", path, body))

    async def well(self, path: str, body: object = msgspec.UNSET) -> Answer:
        """A POST that must be answered with 200."""
        answer = await self.post(path, body)
        expect(answer.status == 200, f"{path} answered {answer}")
        return answer

    async def generate(self, count: int = TOKENS, **more: object) -> Answer:
        """A greedy request, which must be answered with 200."""
        return await self.well("/generate", asking(count, **more))

    async def tokens(self) -> list[object]:
        return (await self.generate()).tokens

    def whose(self, tokens: Sequence[object]) -> str:
        """Whose tokens these begin as: those of the weights that it started with, or others."""
        return "its own" if tuple(tokens) == self.own_tokens[: len(tokens)] else "others"

    async def running(self, count: int = LONG_TOKENS, **more: object) -> "asyncio.Task[Answer]":
        """A long request that the scheduler is busy with, by the server's own word: it refuses a flush."""
        request = asyncio.create_task(self.generate(count, **more))
        while (await self.post("/flush_cache")).status == 200:
            expect(not request.done(), "the request ended before it was seen running")
            await asyncio.sleep(POLL_S)
        return request

    async def idle(self) -> None:
        """Return once nothing runs: a request leaves the batch after its answer. Empties the cache."""
        async with asyncio.timeout(WAIT_S):
            while await self._is_busy():  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(POLL_S)

    async def settled(self) -> None:
        """The same with the cache kept, where no more is asked: each answer is a round of the scheduler."""
        for _ in range(2):
            await self.get("/server_info")
            await asyncio.sleep(STEP_S)

    async def _is_busy(self) -> bool:
        return (await self.post("/flush_cache")).status != 200

    @asynccontextmanager
    async def slowly(self) -> AsyncIterator[None]:
        """Inside, a request of `ENDLESS_TOKENS` goes on until it is aborted; outside, nothing runs."""
        await self.well("/slow_down", {"forward_sleep_time": STEP_S})
        yield
        await self.well("/continue_generation", {})
        await self.well("/abort_request", {"abort_all": True})
        await self.idle()
        await self.well("/slow_down", {"forward_sleep_time": None})

    async def held(self, request: "asyncio.Task[Answer]") -> None:
        """The request is not answered yet, and not for want of time."""
        await asyncio.sleep(HELD_S)
        expect(not request.done(), "the request was answered, and should be held")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Inside, weights may be pushed: a session is open where there are sessions."""
        if self.sessions:
            await self.well("/begin_weight_update", {})
        yield
        if self.sessions:
            await self.well("/end_weight_update", {})

    def entries(self, entry: str) -> list[str]:
        """`serialized_named_tensors` with the same entry for every rank."""
        return [entry] * self.capabilities.tp_size

    def update(self, entry: str, **more: object) -> dict[str, object]:
        """The body of an update with the same entry for every rank."""
        return {"serialized_named_tensors": self.entries(entry), "flush_cache": False, **more}

    async def gone(self) -> None:
        """Return once nobody listens.

        A process that is being killed may still take a connection, and drop it.
        """
        async with asyncio.timeout(WAIT_S):
            while not await self._is_gone():  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(POLL_S)

    async def _is_gone(self) -> bool:
        try:
            async with asyncio.timeout(WAIT_S):
                reply = await self.transport.request("GET", "/model_info")
        except NotSent:
            return True
        except (AnswerLost, Unreachable):
            return False
        raise Broken(f"the server still answers: {reply.status}")

    async def dies_of(self, method: str, path: str, body: object = msgspec.UNSET) -> None:
        """The call gets no answer, and the server is gone after it.

        A GET whose answer was lost is sent once more, and then there is nobody to send it to.
        """
        try:
            reply = await self.reply(method, path, body)
        except (AnswerLost, NotSent):
            await self.gone()
        else:
            raise Broken(f"{path} was answered with {reply!r:.300}")


def asking(count: int = TOKENS, **more: object) -> dict[str, object]:
    """The body of a greedy request."""
    params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return {"input_ids": list(PROMPT), "sampling_params": params, **more}


def zeros(*tensors: tuple[str, tuple[int, ...]]) -> str:
    """One entry of `serialized_named_tensors`: float32 zeros under these names and shapes."""
    specs = [TensorSpec.of(name, "F32", shape) for name, shape in tensors]
    return carried((spec, bytes(spec.nbytes)) for spec in specs)


def carried(tensors: Iterable[tuple[TensorSpec, bytes]]) -> str:
    """One entry of `serialized_named_tensors` with these tensors."""
    return cpu_payload(tensors).decode()


def _decoded(reply: Reply) -> Answer:
    try:
        return Answer(reply.status, msgspec.json.decode(reply.body))
    except msgspec.DecodeError:
        return Answer(reply.status, reply.body.decode(errors="replace"))
