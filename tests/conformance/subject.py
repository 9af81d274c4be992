"""A server under test, and hands to work it with."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from refitfsm.drivers.base import Observation
from refitfsm.drivers.push import Load, inline
from refitfsm.drivers.sglang import SGLangDriver
from refitfsm.drivers.transport import Reply, Transport
from refitfsm.model.records import Issued
from refitfsm.model.values import Capabilities, Command, CommandKind, EventName
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.plan import PushWish
from refitfsm.weights.source import WeightSource

RUN = "conformance"
PROMPT = [5, 6, 7]
TOKENS = 8
LONG_TOKENS = 300
HELD_S = 0.15
"""A request that is held is not answered within this; one that is not held would be."""
POLL_S = 0.01
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
        self.driver = SGLangDriver(self.transport, RUN, aside=inline)

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

    async def running(self) -> "asyncio.Task[dict[str, object]]":
        """A long request that the scheduler is busy with, by the server's own word: it refuses a flush."""
        request = asyncio.create_task(self.greedy(LONG_TOKENS))
        while (await self.transport.request("POST", "/flush_cache")).status == 200:
            assert not request.done(), "the request ended before it was seen running"
            await asyncio.sleep(POLL_S)
        return request

    def load(self, seed: int) -> Load:
        source = self.source(seed)
        return Load(source, source.plan(PushWish(chunk_bytes_max=self.chunk_bytes_max)).chunks)

    async def push(self, seed: int, version: int, *, session: bool = True) -> None:
        """Put whole weights in place, as a cycle does."""
        load = self.load(seed)
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


def one_tensor(subject: Subject, name: str, shape: tuple[int, ...] = (4,)) -> dict[str, object]:
    """The body of a push of one small tensor of zeros, for every rank."""
    spec = TensorSpec.of(name, "F32", shape)
    entry = cpu_payload([(spec, bytes(spec.nbytes))]).decode()
    return {"serialized_named_tensors": [entry] * subject.capabilities.tp_size, "flush_cache": False}
