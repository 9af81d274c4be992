"""A simulated server on a real socket: any HTTP client can be pointed at it.

When the server dies its sockets are closed without an answer, and connections are refused from then
on, until it is restarted on the same port.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from aiohttp import web

from refitfsm.drivers.transport import TransportError
from refitfsm.sim.faults import FaultSource
from refitfsm.sim.faulty import deliver
from refitfsm.sim.server import SimServer, request_of
from refitfsm.sim.wire import HttpReply

MAX_BODY_BYTES: Final = 8 << 30
_BACKLOG: Final = 128


class HttpFace:
    """One server's listening socket and connections, on the running event loop."""

    def __init__(
        self,
        server: SimServer,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        faults: FaultSource | None = None,
    ) -> None:
        self.server = server
        self.host = host
        self.port = port
        """The port to listen on; after `start` the one that is listened on."""
        self.faults = faults
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._reopening: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Bind and listen.

        Raises:
            OSError: the port is taken, or the host is not of this machine.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # Handlers are cancelled when their client hangs up: the server wants to know.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        self.server.on_death(self._cut)
        self.server.on_open(self._reopen)
        if self.server.listening:
            await self._listen()

    @property
    def listens(self) -> bool:
        """Whether it takes connections: not while its server is dead."""
        return self._listener is not None

    async def _listen(self) -> None:
        if self._runner is None or self._runner.server is None:
            raise RuntimeError("start the face before it listens")
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._runner.server, self.host, self.port, backlog=_BACKLOG)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the socket and all connections. The simulated server itself lives on. Idempotent."""
        if self._reopening is not None:
            self._reopening.cancel()
        self._cut("stopped")
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _cut(self, _cause: str) -> None:
        """Refuse new connections, and close the open ones without a word."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._runner is not None and self._runner.server is not None:
            for connection in self._runner.server.connections:
                connection.force_close()

    def _reopen(self) -> None:
        if self._runner is not None:
            self._reopening = asyncio.get_running_loop().create_task(self._listen())

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = request_of(request.method, request.path, dict(request.query), body or None, request.headers)
        fault = self.faults.draw(request.path) if self.faults is not None else None
        try:
            response = await deliver(self.server, call, fault)
            if isinstance(response, HttpReply):
                return _whole(response)
            return await _events(request, response)
        except TransportError:
            return await _hang_up(request)


def _whole(reply: HttpReply) -> web.Response:
    headers = {"Content-Type": reply.content_type} if reply.content_type else None
    return web.Response(status=reply.status, body=reply.body, headers=headers)


async def _events(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    try:
        await response.prepare(request)
        async for event in events:
            await response.write(event)
        await response.write_eof()
    finally:
        await events.aclose()
    return response


async def _hang_up(request: web.Request) -> web.StreamResponse:
    """Close the client's connection without an answer; the lost connection cancels this handler."""
    request.protocol.force_close()
    await asyncio.get_running_loop().create_future()
    raise AssertionError("a lost connection cancels its handler")


async def serve(
    server: SimServer, host: str = "127.0.0.1", port: int = 0, *, faults: FaultSource | None = None
) -> HttpFace:
    """Put a server on a socket, port 0 for any free one; the face knows `port` and `url`.

    Raises:
        OSError: the port is taken, or the host is not of this machine.
    """
    face = HttpFace(server, host, port, faults=faults)
    await face.start()
    return face


async def run_forever(
    server: SimServer,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    faults: FaultSource | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> str:
    """Serve until the server dies, and return the cause; cancel it to stop. `on_ready` gets the URL.

    Raises:
        OSError: the port is taken, or the host is not of this machine.
    """
    died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def gone(cause: str) -> None:
        if not died.done():
            died.set_result(cause)

    face = await serve(server, host, port, faults=faults)
    server.on_death(gone)
    try:
        if on_ready is not None:
            on_ready(face.url)
        return await died
    finally:
        await face.stop()
