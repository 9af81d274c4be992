"""Whatever anybody asks for: what the table lets through never kills a server and never tears an answer.

The order of a cycle is left out here on purpose. Commands are drawn at random (any kind, any tags, any
chunk, any version), judged by the table on what is believed, and carried out on a simulated server when
the table takes them. Strangers send probes and requests meanwhile.
"""

import asyncio
import random
from collections import Counter

import pytest

from refitfsm.drivers.push import Load, inline
from refitfsm.drivers.sglang import SGLangDriver
from refitfsm.model.fleet import admits
from refitfsm.model.laws import broken
from refitfsm.model.records import Issued
from refitfsm.model.states import ServerState, Tag
from refitfsm.model.table import Verdict
from refitfsm.model.values import Command, CommandKind, Event, EventName, Facts, ServerView
from refitfsm.planner.judge import apply, judge
from refitfsm.sim.config import FAST, SimConfig
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.laws import belief_is_false, wrong_answer
from refitfsm.sim.loop import run
from refitfsm.sim.server import SimServer
from refitfsm.sim.transport import SimTransport
from refitfsm.weights.plan import PushWish
from tests.support.world import RUN, TinySource

SEQUENCES = 10_000
PARTS = 20
STEPS = 20
KINDS = [*CommandKind, *[CommandKind.PUSH] * 4, CommandKind.VERIFY, CommandKind.RESUME, CommandKind.END]
DRAWS = 30
"""Commands that are asked for in one step, until the table takes one."""
FAR_S = 1e9
CONFIGS = [
    SimConfig(
        sglang_version=version, memory_saver=saver, weights_cpu_backup=backup, timings=FAST, skip_warmup=True
    )
    for version in ("0.5.12", "0.5.16", "0.5.23")
    for saver, backup in ((True, False), (True, True), (False, False))
]


class Walk:
    """One server, its believed view, and a crowd that asks for anything."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.server = SimServer(self.dice.choice(CONFIGS), name="s")
        self.transport = SimTransport(self.server)
        self.driver = SGLangDriver(self.transport, RUN, aside=inline)
        self.view = ServerView("s")
        self.serving = self.push = 0
        self.digests = {0: digest_of(tiny_model(0))}
        self.strangers: list[asyncio.Task[object]] = []
        self.taken = 0
        self.states: set[ServerState] = set()

    def draw(self) -> Command:
        """Any command at all; a little more often one that could be meant."""
        kind = self.dice.choice(KINDS)
        tags = frozenset(tag for tag in Tag if self.dice.random() < 0.5)
        content = self.view.content
        version = self.dice.choice((content.version, content.version, self.serving, self.serving + 1))
        chunks = len(TinySource(0).plan(PushWish()).chunks)
        chunk = self.dice.choice((content.chunks_done, 0, self.dice.randrange(chunks)))
        return Command(kind, tags=tags, version=version, chunk=min(chunk, chunks - 1), chunks=chunks)

    async def step(self) -> None:
        facts = Facts(self.serving, 1, self.push)
        for _ in range(DRAWS):
            command = self.draw()
            asked = Event(EventName(command.kind.value), command, cycle=1, deadline_s=FAR_S)
            judgement = judge(self.view, asked, facts)
            if judgement.verdict is Verdict.TAKE:
                break
            assert judgement.rule
            assert judgement.remedy
        else:
            return
        self.taken += 1
        self.states.add(self.view.state)
        self.view = apply(self.view, asked, facts, judgement.row)
        if command.kind is CommandKind.PUSH:
            self.digests.setdefault(command.version, digest_of(tiny_model(command.version)))
            source = TinySource(command.version)
            self.driver.load = Load(source, source.plan(PushWish()).chunks)
        if command.kind is CommandKind.DRAIN:
            happened = Event(EventName.DRAINED, cycle=1, seq=self.view.seq)
        else:
            issued = Issued("s", 1, self.view.seq, command, FAR_S)
            seen = await self.driver.execute(issued)
            happened = Event(seen.event, None, 1, self.view.seq, report=seen.report, detail=seen.detail)
        answered = judge(self.view, happened, facts)
        assert answered.verdict is Verdict.TAKE, happened
        self.view = apply(self.view, happened, facts, answered.row)
        ready = self.view.state is ServerState.KV_REBUILT and self.view.content.version > self.serving
        if ready and self.dice.random() < 0.5:
            self.serving, self.push = self.view.content.version, self.view.content.cycle

    def crowd(self) -> None:
        """Strangers do as they like with a paused server, and with one that has all of its memory."""
        if self.dice.random() < 0.3 and (self.view.paused or self.view.everything_resident):
            path, body = self.dice.choice(
                (
                    ("/health", None),
                    ("/generate", b'{"input_ids":[7,8],"sampling_params":{"max_new_tokens":2}}'),
                )
            )
            method = "POST" if body else "GET"
            work = self.transport.request(method, path, body)
            self.strangers.append(asyncio.get_running_loop().create_task(work))

    async def ask(self) -> None:
        if admits(self.view):
            body = b'{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":3}}'
            await self.driver.generate(body, 60.0)

    def check(self) -> None:
        law = broken((self.view,), Facts(self.serving, 1, self.push))
        assert law is None, law
        assert self.server.truth.alive, self.server.truth.death
        false = belief_is_false(self.view, self.server.truth, self.digests)
        assert false is None, false

    async def life(self) -> None:
        for _ in range(STEPS):
            self.crowd()
            await self.step()
            self.check()
            await self.ask()
        ours = [answer for answer in self.server.truth.answers if answer.prompt == (1, 2, 3)]
        wrong = wrong_answer(ours, self.digests, RUN)
        assert wrong is None, wrong
        for task in self.strangers:
            task.cancel()
        await asyncio.gather(*self.strangers, return_exceptions=True)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_sequence_of_commands_kills_a_server(part: int) -> None:
    """10,000 random sequences in all: no server dies, belief is true, no answer is torn or stale."""
    states: Counter[ServerState] = Counter()
    for seed in range(part, SEQUENCES, PARTS):
        walk: list[Walk] = []

        async def life(seed: int = seed, walk: list[Walk] = walk) -> None:
            walk.append(Walk(seed))
            await walk[0].life()

        try:
            run(life())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        states.update(walk[0].states)
    assert all(states[state] >= 5 for state in ServerState), (
        f"walks that do not get far prove little: {states}"
    )
