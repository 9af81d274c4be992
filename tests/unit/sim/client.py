"""A few words for talking to a simulated server in tests."""

import json
from dataclasses import replace
from typing import Any

from refitfsm.drivers.transport import Reply
from refitfsm.sim.config import FAST, SimConfig, Timings
from refitfsm.sim.faults import FaultSource
from refitfsm.sim.server import SimServer
from refitfsm.sim.transport import SimTransport

from .pickles import fill

PROMPT = [5, 6, 7]


class Client:
    """One server and a way to call it."""

    def __init__(
        self, server: SimServer | None = None, faults: FaultSource | None = None, **options: Any
    ) -> None:
        self.server = server or SimServer(SimConfig(**{"timings": FAST, **options}))
        self.transport = SimTransport(self.server, faults)

    @property
    def truth(self) -> Any:
        return self.server.truth

    async def call(self, method: str, path: str, body: object = None) -> Reply:
        data = None if body is None else json.dumps(fill(body)).encode()
        return await self.transport.request(method, path, data)

    async def post(self, path: str, body: object = None) -> int:
        """The status of a POST; the body is `{}` unless given."""
        return (await self.call("POST", path, {} if body is None else body)).status

    async def get(self, path: str) -> Any:
        """The JSON of a GET that answers 200."""
        reply = await self.call("GET", path)
        assert reply.status == 200, reply
        return json.loads(reply.body)

    async def push(self, payload: str, **more: object) -> int:
        """The status of an update, in a session where the release wants one."""
        sessions = self.truth.profile.sessions_required
        if sessions:
            assert await self.post("/begin_weight_update") == 200
        status = await self.post(
            "/update_weights_from_tensor", {"serialized_named_tensors": [payload], **more}
        )
        if sessions:
            assert await self.post("/end_weight_update") == 200
        return status

    async def generate(self, count: int = 6, prompt: list[int] | None = None, **more: object) -> Any:
        """The JSON of a generation that answers 200."""
        params = {"max_new_tokens": count}
        reply = await self.call(
            "POST", "/generate", {"input_ids": prompt or PROMPT, "sampling_params": params, **more}
        )
        assert reply.status == 200, reply
        return json.loads(reply.body)

    async def tokens(self, count: int = 6, prompt: list[int] | None = None) -> list[int]:
        """The tokens of a generation."""
        found: list[int] = (await self.generate(count, prompt))["output_ids"]
        return found


def timings(**changed: Any) -> Timings:
    """No latency, but for what is given."""
    return replace(FAST, **changed)
