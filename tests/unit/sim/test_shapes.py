"""The shapes of answers that no scenario covers: routes, methods, keys, and what only asks."""

import asyncio
import json
import math
import struct

import pytest

from refitfsm.sim.content import cast, tiny_model
from refitfsm.sim.loop import run
from refitfsm.sim.numbers import packed, unpacked
from refitfsm.sim.server import request_of
from refitfsm.sim.wire import HttpReply

from .client import Client


def test_an_unknown_path_is_absent_and_a_wrong_method_is_not() -> None:
    """404 tells that a route does not exist, 405 that it does: a probe without side effects."""

    async def main() -> None:
        client = Client()
        assert await client.call("POST", "/nope") == (404, b'{"detail":"Not Found"}')
        assert await client.call("GET", "/pause_generation") == (405, b'{"detail":"Method Not Allowed"}')
        assert (await client.call("POST", "/begin_weight_update")).status == 400

    run(main())


@pytest.mark.parametrize(
    ("version", "path", "status"),
    [
        ("0.5.19", "/ready", 404),
        ("0.5.20", "/ready", 200),
        ("0.5.20", "/get_load", 200),
        ("0.5.21", "/get_load", 404),
        ("0.5.20", "/get_weight_version", 404),
        ("0.5.21", "/get_weight_version", 404),
        ("0.5.12", "/weights_checker", 405),
        ("0.5.13", "/weights_checker", 200),
        ("0.5.12.post1", "/server_info", 200),
        ("0.5.12.post1", "/get_model_info", 200),
    ],
)
def test_a_route_exists_in_its_releases(version: str, path: str, status: int) -> None:
    """Routes come and go with the releases the protocol says."""

    async def main() -> None:
        assert (await Client(sglang_version=version).call("GET", path)).status == status

    run(main())


def test_a_retired_route_says_so() -> None:
    """A route kept only to say it is gone has another 404 than one that never was."""

    async def main() -> None:
        client = Client(sglang_version="0.5.16")
        body = json.loads((await client.call("GET", "/get_weight_version")).body)
        assert (body["object"], body["code"]) == ("error", 404)

    run(main())


def test_ready_follows_the_gate() -> None:
    """Ready says 503 while paused, and 200 on a released server: it knows nothing of memory."""

    async def main() -> None:
        client = Client()
        await client.post("/release_memory_occupation")
        assert (await client.call("GET", "/ready")).status == 200
        await client.post("/pause_generation")
        assert (await client.call("GET", "/ready")).status == 503

    run(main())


@pytest.mark.parametrize(
    ("keys", "key", "path", "status"),
    [
        ({"api_key": "k"}, "", "/model_info", 401),
        ({"api_key": "k"}, "k", "/model_info", 200),
        ({"api_key": "k"}, "k", "/flush_cache", 200),
        ({"api_key": "k"}, "", "/health", 200),
        ({"api_key": "k"}, "", "/ready", 200),
        ({"admin_api_key": "a"}, "", "/model_info", 200),
        ({"admin_api_key": "a"}, "", "/flush_cache", 401),
        ({"api_key": "k", "admin_api_key": "a"}, "k", "/flush_cache", 401),
        ({"api_key": "k", "admin_api_key": "a"}, "a", "/flush_cache", 200),
        ({"api_key": "k", "admin_api_key": "a"}, "a", "/model_info", 401),
    ],
)
def test_each_route_asks_for_its_key(keys: dict[str, str], key: str, path: str, status: int) -> None:
    """Steering calls want the admin key where one is set; asking calls the plain one; health none."""

    async def main() -> None:
        server = Client(**keys).server
        headers = {"Authorization": f"bearer {key}"} if key else {"Accept": "*/*"}
        reply = await server.call("GET", path, headers=headers)
        assert reply.status == status
        if status == 401:
            assert json.loads(reply.body) == {"error": "Unauthorized"}

    run(main())


def test_a_body_must_be_declared_json() -> None:
    """A body without the JSON content type counts as none."""

    async def main() -> None:
        server = Client().server
        plain = {"Content-Type": "text/plain"}
        assert (await server.call("POST", "/pause_generation", body=b"{}", headers=plain)).status == 400
        typed = {"content-type": "application/json; charset=utf-8"}
        assert (await server.call("POST", "/pause_generation", body=b"{}", headers=typed)).status == 200

    run(main())


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{", b'{"tags": "weights"}', b'{"tags": [1]}'])
def test_a_bad_body_changes_nothing(body: bytes) -> None:
    """A body that does not fit is a 400 in the error shape, and the server is as before."""

    async def main() -> None:
        client = Client()
        reply = await client.transport.request("POST", "/release_memory_occupation", body)
        assert reply.status == 400
        assert json.loads(reply.body)["object"] == "error"
        assert not client.truth.memory.listed

    run(main())


@pytest.mark.parametrize("timeout", ["-1", "soon", "nan"])
def test_a_bad_flush_timeout_is_refused(timeout: str) -> None:
    """A timeout below zero or not a number is a 400 in the error shape."""

    async def main() -> None:
        reply = await Client().call("POST", f"/flush_cache?timeout={timeout}")
        assert reply.status == 400
        assert json.loads(reply.body)["code"] == 400

    run(main())


def test_a_schema_violation_of_generate_is_a_string_in_newer_releases() -> None:
    """From 0.5.22 on a body that breaks the schema of /generate is answered by a bare string."""

    async def main() -> None:
        bad = {"input_ids": "five"}
        newer = json.loads((await Client().call("POST", "/generate", bad)).body)
        older = json.loads((await Client(sglang_version="0.5.21").call("POST", "/generate", bad)).body)
        assert isinstance(newer["error"], str)
        assert older["object"] == "error"

    run(main())


def test_loads_count_what_runs_and_waits() -> None:
    """The load snapshot shows running and waiting requests, as JSON and in Prometheus's format."""

    async def main() -> None:
        client = Client()
        load = (await client.get("/v1/loads"))["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
        text = (await client.call("GET", "/v1/loads?format=prometheus")).body.decode()
        assert 'sglang_num_running_reqs{dp_rank="0"} 0' in text

    run(main())


def test_values_of_a_tensor_are_read_back() -> None:
    """The first rows of a tensor come back as the numbers that were loaded."""

    async def main() -> None:
        client = Client()
        rows = json.loads(
            (
                await client.call(
                    "POST", "/get_weights_by_name", {"name": "lm_head.weight", "truncate_size": 3}
                )
            ).body
        )
        assert (len(rows), len(rows[0])) == (3, 8)
        norm = json.loads(
            (await client.call("POST", "/get_weights_by_name", {"name": "model.norm.weight"})).body
        )
        assert len(norm) == 8
        assert any(norm)

    run(main())


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64"])
def test_converted_values_are_read_back(dtype: str) -> None:
    """A server that holds another number format reads back what its conversion made of what was pushed."""

    async def main() -> None:
        given = tiny_model(1)["lm_head.weight"]
        client = Client(parameters={"lm_head.weight": cast(given, dtype)})
        body = {"name": "lm_head.weight", "truncate_size": 1}
        (row,) = json.loads((await client.call("POST", "/get_weights_by_name", body)).body)
        assert row == list(struct.unpack("<8f", given.head[:32]))  # few digits: exact in all of these

    run(main())


def test_numbers_are_rounded_to_the_nearest() -> None:
    """Ties go to the even one, too large a number becomes infinite, and NaN stays one."""
    assert unpacked("BF16", packed("BF16", [1 / 3, 1 + 2**-8, 1 + 3 * 2**-8])) == [0.333984375, 1.0, 1.015625]
    assert unpacked("F16", packed("F16", [1e6, -1e6, 0.5])) == [math.inf, -math.inf, 0.5]
    assert all(math.isnan(unpacked(dtype, packed(dtype, [math.nan]))[0]) for dtype in ("BF16", "F16", "F32"))
    assert (packed("I8", [1.0]), unpacked("C64", b"12345678")) == (b"", [])


@pytest.mark.parametrize(
    ("name", "reads_back", "dies"), [("x", True, False), (None, False, False), (None, True, True)]
)
def test_reading_back_touches_only_what_it_finds(name: str | None, reads_back: bool, dies: bool) -> None:
    """Released weights kill whoever reads them; a name or a model that has nothing to read does not."""

    async def main() -> None:
        client = Client(reads_back=reads_back)
        await client.post("/release_memory_occupation", {"tags": ["weights"]})
        body = {"name": name or "lm_head.weight"}
        assert await client.post("/get_weights_by_name", body) == 400
        await asyncio.sleep(6)
        assert client.truth.alive is not dies

    run(main())


def test_the_face_gives_content_types() -> None:
    """JSON, text and empty answers carry the content types of the real ones."""

    async def main() -> None:
        server = Client().server
        kinds = {}
        for method, path in (("GET", "/model_info"), ("POST", "/flush_cache"), ("GET", "/ready")):
            reply = await server.respond(request_of(method, path))
            assert isinstance(reply, HttpReply)
            kinds[path] = reply.content_type
        assert kinds == {
            "/model_info": "application/json",
            "/flush_cache": "text/plain; charset=utf-8",
            "/ready": None,
        }

    run(main())
