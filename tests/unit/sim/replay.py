"""Replays observed scenarios, step by step, against a simulated server on the virtual clock."""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from refitfsm.drivers.transport import AnswerLost, NotSent, Reply
from refitfsm.sim.config import SimConfig
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.ledger import GpuLedger
from refitfsm.sim.server import SimServer
from refitfsm.sim.tokens import expected
from refitfsm.sim.transport import SimTransport

from .pickles import fill

Step = dict[str, Any]


@dataclass
class Result:
    """How a call ended: an answer or an exception, and when."""

    reply: Reply | None
    error: Exception | None
    started_s: float
    ended_s: float

    @property
    def took_s(self) -> float:
        return self.ended_s - self.started_s


class Replay:
    """One scenario on one fresh server."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        options = dict(scenario["server"])
        capacity = options.pop("gpu_capacity", None)
        if isinstance(options.get("parameters"), str):
            options["parameters"] = tiny_model(int(options["parameters"].removeprefix("seed")))
        options["gpus"] = tuple(f"GPU-{rank}" for rank in range(options.get("tp_size", 1)))
        self.ledger = GpuLedger(dict.fromkeys(options["gpus"], capacity) if capacity else None)
        self.server = SimServer(SimConfig(**options), ledger=self.ledger)
        self.transport = SimTransport(self.server)
        self.steps: list[Step] = scenario["steps"]
        self.started: dict[str, asyncio.Task[Result]] = {}
        self.saved: dict[str, object] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, float] = {}

    async def run(self) -> None:
        """All steps.

        Raises:
            AssertionError: the simulated server did something else than the real one.
        """
        for number, step in enumerate(self.steps):
            try:
                await self._step(step)
            except AssertionError as error:
                raise AssertionError(f"step {number} {json.dumps(step)[:300]}: {error}") from error
        for task in self.started.values():
            task.cancel()

    async def _step(self, step: Step) -> None:
        if "wait" in step:
            await asyncio.sleep(step["wait"])
        elif "join" in step:
            result = await self.started.pop(step["join"])
            self.ends[step["join"]] = result.ended_s
            self._judge(step, result)
        elif "joinany" in step:
            await self.started.pop(step["joinany"])
        elif "pending" in step:
            assert not self.started[step["pending"]].done(), "it has ended"
        elif "hang_up" in step:
            self.started.pop(step["hang_up"]).cancel()
            await asyncio.sleep(0)
        elif "kill_scheduler" in step:
            self.server.kill_scheduler()
        elif "freeze" in step:
            self.server.freeze()
        elif "thaw" in step:
            self.server.thaw()
        elif "trainer_leaves_free" in step:
            free = self.ledger.free("GPU-0")
            assert free is not None
            assert self.ledger.take("GPU-0", "trainer", free - step["trainer_leaves_free"])
        elif "start" in step:
            self.started[step["start"]] = asyncio.create_task(self._call(step))
            await asyncio.sleep(0)
        else:
            self._judge(step, await self._call(step))

    async def _call(self, step: Step) -> Result:
        method, path = step["call"].split(" ")
        body = json.dumps(fill(step["body"])).encode() if "body" in step else None
        loop = asyncio.get_running_loop()
        started = loop.time()
        reply, failure = None, None
        try:
            reply = await self.transport.request(method, path, body)
        except (AnswerLost, NotSent) as error:
            failure = error
        return Result(reply, failure, started, loop.time())

    def _judge(self, step: Step, result: Result) -> None:
        if "seconds" in step:
            low, high = step["seconds"]
            assert low - 1e-6 <= result.took_s <= high + 1e-6, f"it took {result.took_s:.4f} s"
        if step.get("refused"):
            assert isinstance(result.error, NotSent), f"it got {result.reply or result.error}"
            return
        if "dies" in step or step.get("lost"):
            assert isinstance(result.error, AnswerLost), f"it got {result.reply or result.error}"
            assert re.search(step.get("dies", ""), self.server.truth.death or ""), self.server.truth.death
            return
        assert result.reply is not None, f"it got {result.error}"
        status, body = result.reply
        assert status == step["status"], f"it got {status}: {body[:300]!r}"
        if "text" in step:
            assert body.decode() == step["text"], body
        if "matches" in step:
            assert re.search(step["matches"], body.decode(), re.DOTALL), body[:500]
        if "after" in step:
            assert result.ended_s > self.ends[step["after"]], "it did not wait"
        self._judge_json(step, body)

    def _judge_json(self, step: Step, body: bytes) -> None:
        wanted = {"json", "has", "length", "save", "equal", "differs", "tokens", "meta", "count"} & set(step)
        if not wanted:
            return
        value = json.loads(body)
        if "json" in step:
            assert value == step["json"], value
        for key, each in step.get("has", {}).items():
            assert value[key] == each, value
        if "length" in step:
            assert len(value) == step["length"], value
        for key, name in step.get("save", {}).items():
            self.saved[name] = value[key]
        for key, name in step.get("equal", {}).items():
            assert value[key] == self.saved[name], value
        for key, name in step.get("differs", {}).items():
            assert value[key] != self.saved[name], value
        for key, each in step.get("meta", {}).items():
            assert value["meta_info"][key] == each, value["meta_info"]
        if "count" in step:
            low, high = step["count"]
            assert low <= value["meta_info"]["completion_tokens"] <= high, value["meta_info"]
        if "tokens" in step:
            self._judge_tokens(step["tokens"], step["body"]["input_ids"] if "body" in step else None, value)

    def _judge_tokens(self, label: str, prompt: list[int] | None, value: dict[str, Any]) -> None:
        """The same label is the same answer; other labels are other answers."""
        tokens = value["output_ids"]
        if label == "garbage":
            assert len(set(tokens)) == 1, tokens
            return
        if label.startswith("seed"):
            digest = digest_of(tiny_model(int(label.removeprefix("seed"))))
            asked = tuple(prompt or (5, 6, 7))
            assert tokens == list(expected(digest, asked, len(tokens), self.server.config.vocab_size)), tokens
        known = self.tokens.setdefault(label, tokens)
        assert tokens == known, f"{label} was {known}, now {tokens}"
        others = [name for name, each in self.tokens.items() if name != label and each == tokens]
        assert not others, f"{label} is the same answer as {others}"
