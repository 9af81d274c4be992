"""The simulated server on a real socket."""

import asyncio
import io
import json
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from refitfsm.model.states import ALL_TAGS
from refitfsm.sim.config import SimConfig
from refitfsm.sim.faults import FaultPlan, parse_fault
from refitfsm.sim.http import HttpFace, run_forever, serve
from refitfsm.sim.server import SimServer
from tests.support.until import until

from .client import timings

SOON = timings(death_s=(0.05, 0.05), exit_noticed_s=(0.0, 0.0), decode_s=(0.01, 0.01), stream_hangup_s=0.02)
Body = Callable[[HttpFace, aiohttp.ClientSession], Coroutine[Any, Any, None]]


def _with_server(body: Body, *faults: str, **options: Any) -> None:
    async def main() -> None:
        server = SimServer(SimConfig(**{"timings": SOON, **options}))
        face = await serve(server, faults=FaultPlan(parse_fault(spec) for spec in faults))
        try:
            async with aiohttp.ClientSession(face.url) as session:
                await body(face, session)
        finally:
            await face.stop()

    asyncio.run(main())


async def _post(session: aiohttp.ClientSession, path: str, body: object) -> tuple[int, str]:
    async with session.post(path, json=body) as reply:
        return reply.status, await reply.text()


def test_a_cycle_over_a_socket() -> None:
    """Calls, statuses, bodies and content types are the same as in process."""

    async def body(face: HttpFace, session: aiohttp.ClientSession) -> None:
        assert face.port > 0
        assert await _post(session, "/pause_generation", {}) == (
            200,
            '{"message":"Generation paused successfully.","status":"ok"}',
        )
        assert await _post(session, "/release_memory_occupation", {}) == (200, "null")
        assert await _post(session, "/resume_memory_occupation", {}) == (200, "null")
        assert (await _post(session, "/continue_generation", {}))[0] == 200
        async with session.get("/flush_cache", params={"timeout": "1"}) as reply:
            assert (reply.status, reply.content_type) == (200, "text/plain")
        async with session.post("/pause_generation", data="{}") as reply:
            assert reply.status == 400
        async with session.put("/flush_cache") as reply:
            assert reply.status == 405

    _with_server(body)


def test_a_death_closes_sockets_and_refuses_until_a_restart() -> None:
    """The offending call and an idle connection are closed without an answer; then nothing listens."""

    async def body(face: HttpFace, session: aiohttp.ClientSession) -> None:
        other = asyncio.create_task(_post(session, "/generate", {"input_ids": [1], "sampling_params": {}}))
        await until(lambda: not face.server.truth.idle())
        for work in (_post(session, "/release_memory_occupation", {}), other):
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await work
        with pytest.raises(aiohttp.ClientConnectorError):
            await _post(session, "/flush_cache", {})
        port = face.port
        assert face.server.restart()
        await until(lambda: face.listens)
        assert face.port == port
        async with session.get("/model_info") as reply:
            assert reply.status == 200

    _with_server(body)


def test_a_stream_over_a_socket() -> None:
    """Server-sent events arrive one by one, and a client that leaves frees the server."""

    async def body(face: HttpFace, session: aiohttp.ClientSession) -> None:
        ask = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}, "stream": True}
        async with session.post("/generate", json=ask) as reply:
            assert reply.content_type == "text/event-stream"
            events = (await reply.text()).strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert len(json.loads(events[-2].removeprefix("data: "))["output_ids"]) == 3
        ask["sampling_params"] = {"max_new_tokens": 1000}
        async with session.post("/generate", json=ask) as reply:
            await reply.content.readline()
        await until(face.server.truth.idle)
        assert face.server.truth.answers[-1].aborted

    _with_server(body)


def test_a_client_that_leaves_does_not_stop_a_release() -> None:
    """A control call whose client has gone is carried out."""

    async def body(face: HttpFace, session: aiohttp.ClientSession) -> None:
        call = asyncio.create_task(_post(session, "/release_memory_occupation", {}))
        await until(lambda: face.server.calls_open == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert face.server.truth.resident == ALL_TAGS
        await until(lambda: face.server.truth.resident != ALL_TAGS)

    _with_server(body, timings=timings(release_s=(0.2, 0.2)))


def test_faults_over_a_socket() -> None:
    """The same faults apply: a lost answer is a closed connection, a status is a status."""

    async def body(face: HttpFace, session: aiohttp.ClientSession) -> None:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await _post(session, "/release_memory_occupation", {})
        assert face.server.truth.resident != ALL_TAGS
        assert (await _post(session, "/flush_cache", {}))[0] == 502
        assert (await _post(session, "/flush_cache", {}))[0] == 200

    _with_server(body, "lose-answer@/release_memory_occupation", "status-before=502@/flush_cache")


def test_a_large_body_is_taken() -> None:
    """A payload far above the usual limit of a web server reaches the decoder."""

    async def body(face: HttpFace, session: aiohttp.ClientSession) -> None:
        ask = json.dumps({"serialized_named_tensors": ["A" * (4 << 20)]}).encode()
        kind = {"Content-Type": "application/json"}
        async with session.post("/update_weights_from_tensor", data=io.BytesIO(ask), headers=kind) as reply:
            assert (reply.status, "must run between" in await reply.text()) == (400, True)

    _with_server(body)


def test_serving_ends_with_the_server() -> None:
    """`run_forever` tells where it listens, and returns the cause when the server dies."""

    async def main() -> str:
        server = SimServer(SimConfig(timings=SOON))
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(run_forever(server, on_ready=ready.set_result))
        async with aiohttp.ClientSession(await ready) as session:
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await _post(session, "/resume_memory_occupation", {"tags": ["weights"]})
        return await serving

    assert asyncio.run(main()) == "KeyError: 'weights'"


def test_a_taken_port_is_an_error() -> None:
    """Two servers cannot listen on one port: the second is told."""

    async def main() -> None:
        first = await serve(SimServer(name="first"))
        try:
            with pytest.raises(OSError, match="in use"):
                await serve(SimServer(name="second"), port=first.port)
        finally:
            await first.stop()

    asyncio.run(main())


def test_stopping_the_face_leaves_the_server() -> None:
    """The socket is closed, twice without harm, and the simulated server is as it was."""

    async def main() -> None:
        server = SimServer()
        face = await serve(server)
        await face.stop()
        await face.stop()
        assert server.truth.alive

    asyncio.run(main())
