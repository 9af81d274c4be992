"""One simulated SGLang server: it answers HTTP calls, and dies of what the real one dies of."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Final

import msgspec

from refitfsm.drivers.transport import AnswerLost, NotSent, Reply
from refitfsm.sim import generate_routes as generation
from refitfsm.sim.auth import allowed
from refitfsm.sim.choices import CalmChooser, Chooser
from refitfsm.sim.config import SimConfig
from refitfsm.sim.eager import Left, first_step, rest
from refitfsm.sim.engine import Engine, Status
from refitfsm.sim.ledger import GpuLedger
from refitfsm.sim.requests import Job
from refitfsm.sim.residency import Fatal
from refitfsm.sim.routes import Route, routes_of
from refitfsm.sim.truth import Truth
from refitfsm.sim.wire import JSON, NOT_FOUND, UNAUTHORIZED, WRONG_METHOD, HttpReply, HttpRequest

_NO_QUERY: Final[Mapping[str, str]] = {}
_DONE: Final = b"data: [DONE]\n\n"


class SimServer:
    """The server. `truth` is its true state; everything it says goes through `call` or `stream`.

    It is up and warm when it is made, holding its bytes of the ledger. Its own time is the running
    event loop's; everything uncertain about it is asked of its chooser.

    Raises:
        ValueError: the release is not simulated, or the GPUs have no room for it.
    """

    def __init__(
        self,
        config: SimConfig | None = None,
        *,
        name: str = "server",
        ledger: GpuLedger | None = None,
        chooser: Chooser | None = None,
    ) -> None:
        self.name = name
        self.config = config or SimConfig()
        self.chooser: Chooser = chooser or CalmChooser()
        self.truth = Truth(name, self.config, ledger or GpuLedger())
        self.listening = False
        """Whether a connection would be accepted."""
        self._routes = routes_of(self.truth.profile)
        self._open: dict[asyncio.Task[None], Callable[[Exception], None]] = {}
        self._on_death: list[Callable[[str], None]] = []
        self._on_open: list[Callable[[], None]] = []
        self._boot_timer: asyncio.TimerHandle | None = None
        if not self.truth.start():
            raise ValueError(f"{name}: the GPUs {list(self.truth.memory.gpus)} have no room for this server")
        self.engine = Engine(self.truth, self.chooser, self._gone)
        self.listening = True

    # --- life -------------------------------------------------------------------------------------

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call this with the cause whenever the server is gone, after its connections were cut."""
        self._on_death.append(callback)

    def on_open(self, callback: Callable[[], None]) -> None:
        """Call this whenever a restarted server begins to accept connections."""
        self._on_open.append(callback)

    def kill(self, reason: str = "killed") -> None:
        """End all its processes now, as SIGKILL of the group does: connections are cut at once."""
        if self.truth.alive:
            self._gone(reason)

    def kill_scheduler(self, reason: str = "scheduler killed") -> None:
        """End the scheduler process only: the rest follows a few seconds later."""
        self.engine.scheduler.fail(Fatal(reason))

    def freeze(self) -> None:
        """Stop the scheduler (SIGSTOP): what needs it hangs until `thaw`."""
        self.engine.scheduler.freeze()

    def thaw(self) -> None:
        """Let the scheduler go on (SIGCONT)."""
        self.engine.scheduler.thaw()

    def restart(self) -> bool:
        """Begin a new incarnation with the start-up weights and version; False without room on the GPUs.

        The memory is held at once; connections are refused until the boot time has passed, and health
        is 503 until the warm-up request has been answered. Needs a running event loop.

        Raises:
            RuntimeError: the server is not dead.
        """
        if self.truth.alive:
            raise RuntimeError(f"{self.name} is alive: kill it before restarting it")
        if not self.truth.start():
            return False
        self.engine = Engine(self.truth, self.chooser, self._gone)
        boot_s = self.engine.scheduler.draw("boot", self.config.timings.boot_s)
        if boot_s > 0:
            self._boot_timer = asyncio.get_running_loop().call_later(boot_s, self._open_port)
        else:
            self._open_port()
        return True

    def _open_port(self) -> None:
        self.listening = True
        if not self.config.skip_warmup:
            engine = self.engine
            engine.status = Status.STARTING
            seconds = engine.scheduler.draw("warmup", self.config.timings.warmup_s)
            self._spawn(engine.warm_up(seconds), lambda _error: None)
        for callback in self._on_open:
            callback()

    def _gone(self, cause: str) -> None:
        """Every process is gone: cut what is open, refuse what comes."""
        self.listening = False
        if self._boot_timer is not None:
            self._boot_timer.cancel()
        self.truth.die(cause)
        self.engine.scheduler.end(cause)
        cut, self._open = self._open, {}
        for task, tell in cut.items():
            task.cancel()
            tell(AnswerLost(f"{self.name} closed the connection without an answer: {cause}"))
        for callback in self._on_death:
            callback(cause)

    # --- calls ------------------------------------------------------------------------------------

    @property
    def calls_open(self) -> int:
        """How many calls have come in and are not answered."""
        return len(self._open)

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One HTTP call and its whole answer.

        Without headers the body counts as JSON. Cancelling it is a client that hangs up: a control
        call is carried out all the same.

        Raises:
            NotSent: nothing listens.
            AnswerLost: the server died before it answered.
        """
        reply = await self.respond(request_of(method, path, query, body, headers))
        if isinstance(reply, HttpReply):
            return reply.plain()
        return Reply(200, b"".join([event async for event in reply]))

    async def respond(self, request: HttpRequest) -> HttpReply | AsyncGenerator[bytes, None]:
        """As `call`, with the content type; a streamed answer comes as its server-sent events."""
        if not self.listening:
            raise NotSent(f"{self.name} refuses connections: {self.truth.death or 'it is starting'}")
        route = self._route(request)
        if isinstance(route, HttpReply):
            return route
        if route.handler is not None:
            return await self._answer(route.handler(self.engine, request))
        job = generation.parse(self.engine, request)
        if isinstance(job, HttpReply):
            return job
        if job.stream:
            return self._events(job)
        try:
            return await self._answer(generation.generate(self.engine, job))
        except asyncio.CancelledError:
            self.engine.hang_up(job)
            raise

    def _route(self, request: HttpRequest) -> Route | HttpReply:
        route = self._routes.get(request.path)
        if route is None:
            return NOT_FOUND
        if not allowed(request, route.level, self.config, ready_exempt=self.truth.profile.has_ready):
            return UNAUTHORIZED
        return route if request.method in route.methods else WRONG_METHOD

    async def _answer(self, work: Coroutine[object, object, HttpReply]) -> HttpReply:
        """Run a handler apart from its client, so that it outlives a client that hangs up."""
        answer: asyncio.Future[HttpReply] = asyncio.get_running_loop().create_future()

        def tell(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        async def run() -> None:
            try:
                reply = await work
            except Exception as error:  # noqa: BLE001 - a fault of the simulator: the caller must see it
                tell(error)
            else:
                if not answer.done():
                    answer.set_result(reply)

        self._spawn(run(), tell)
        return await answer

    async def _events(self, job: Job) -> AsyncGenerator[bytes, None]:
        engine = self.engine
        news: asyncio.Queue[bytes | Exception] = asyncio.Queue()

        def put(output: dict[str, object]) -> None:
            news.put_nowait(b"data: " + msgspec.json.encode(output) + b"\n\n")

        async def run() -> None:
            await generation.stream(engine, job, put)
            news.put_nowait(_DONE)

        self._spawn(run(), news.put_nowait)
        event: bytes | Exception = b""
        try:
            while event is not _DONE:
                event = await news.get()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            if event is not _DONE:
                engine.hang_up(job)

    def _spawn(self, work: Coroutine[object, object, None], tell: Callable[[Exception], None]) -> None:
        """Run `work` until the server dies; `tell` its client if it does."""
        left = first_step(work)
        if left is not None:
            self._open[asyncio.get_running_loop().create_task(self._follow(left))] = tell

    async def _follow(self, left: Left) -> None:
        try:
            await rest(left)
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._open.pop(task, None)


def request_of(
    method: str,
    path: str,
    query: Mapping[str, str] | None = None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpRequest:
    """A request from its parts; header names in any case."""
    if not headers:
        return HttpRequest(method, path, query or _NO_QUERY, body, True, None)
    found = {name.lower(): value for name, value in headers.items()}
    kind = found.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == JSON or (kind.startswith("application/") and kind.endswith("+json"))
    return HttpRequest(method, path, query or _NO_QUERY, body, is_json, found.get("authorization"))
