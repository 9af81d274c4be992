"""The transport to real servers: what an error of the network says of a server, and what it does not."""

import asyncio
import errno

import aiohttp
import pytest
from aiohttp import web

from refitfsm.drivers.http import HttpTransport
from refitfsm.drivers.transport import AnswerLost, NotSent, Unreachable


def play(handler: object, path: str = "/release_memory_occupation") -> object:
    """The reply of one POST to a server with one handler, or the error."""

    async def life() -> object:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handler)  # type: ignore[arg-type]
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        transport = HttpTransport(f"http://127.0.0.1:{port}", api_key="ordinary", admin_api_key="admin")
        try:
            return await transport.request("POST", path, b"{}")
        finally:
            await transport.aclose()
            await runner.cleanup()

    return asyncio.run(life())


def test_a_redirect_is_not_followed() -> None:
    """A proxy's redirect comes back as it is: following it would turn a release into a read of a page."""
    hits: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        hits.append(request.path)
        return web.Response(status=302, headers={"Location": "/login"})

    assert play(handler).status == 302  # type: ignore[attr-defined]
    assert hits == ["/release_memory_occupation"]


@pytest.mark.parametrize(
    ("path", "key"), [("/generate", "ordinary"), ("/model_info", "ordinary"), ("/pause_generation", "admin")]
)
def test_each_path_takes_its_key(path: str, key: str) -> None:
    """Ordinary paths take the API key, control paths the admin key."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.Response(text="null")

    play(handler, path)
    assert seen == [f"Bearer {key}"]


def test_a_connection_that_breaks_is_a_lost_answer() -> None:
    """The server saw the request and cut the connection: nothing is known."""

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(AnswerLost):
        play(handler)


def test_only_a_refused_connection_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listening is a refusal; no descriptor, no route or no name says nothing of the server."""

    async def ask(url: str) -> None:
        transport = HttpTransport(url)
        try:
            await transport.request("GET", "/model_info")
        finally:
            await transport.aclose()

    with pytest.raises(NotSent):
        asyncio.run(ask("http://127.0.0.1:9"))

    async def no_descriptor(*_args: object, **_kwargs: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(aiohttp.TCPConnector, "_wrap_create_connection", no_descriptor)
    with pytest.raises((Unreachable, AnswerLost)) as caught:
        asyncio.run(ask("http://127.0.0.1:9"))
    assert not isinstance(caught.value, NotSent)
