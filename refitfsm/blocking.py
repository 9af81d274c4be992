"""The same fleet for code without an event loop: plain scripts, notebooks, Ray drivers."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from refitfsm.audit.sink import Logger
from refitfsm.errors import ControllerClosed
from refitfsm.fleet import GENERATE_S, Fleet
from refitfsm.generation import Generation
from refitfsm.hooks import called_plainly
from refitfsm.pushes import Weights
from refitfsm.reports import CycleReport, FleetStatus, joined
from refitfsm.servers import ServerSpec

T = TypeVar("T")


class BlockingFleet:
    """A `Fleet` on an event loop in a thread of its own. Methods block, and may be called from any thread.

        with BlockingFleet.connect(urls, policy="colocated") as fleet:
            fleet.release()
            fleet.refit(weights, version=1)

    Each method does, returns and raises what the method of `Fleet` with its name does.
    """

    def __init__(self, make: Callable[[], Fleet]) -> None:
        """A fleet made by `make`, on the new loop. Most callers want `connect`."""
        self._lock = threading.Lock()
        self._closed = False
        self._started: Future[Fleet] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(make)), name="refitfsm", daemon=True
        )
        self._thread.start()
        self._fleet = self._started.result()

    async def _live(self, make: Callable[[], Fleet]) -> None:
        """The life of the loop: the fleet, until it is shut down. What still runs then is cancelled."""
        self._loop = asyncio.get_running_loop()
        self._leave = asyncio.Event()
        try:
            async with make() as fleet:
                self._started.set_result(fleet)
                await self._leave.wait()
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)  # the constructor raises it

    @classmethod
    def connect(
        cls,
        servers: Iterable[str | ServerSpec],
        *,
        policy: str | Path = "colocated",
        journal: str | Path | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        run_id: str | None = None,
        allow_unknown_version: bool = False,
        logger: Logger | None = None,
    ) -> Self:
        """See `Fleet.connect`; also enrols the servers."""
        return cls(
            lambda: Fleet.connect(
                servers,
                policy=policy,
                journal=journal,
                api_key=api_key,
                admin_api_key=admin_api_key,
                run_id=run_id,
                allow_unknown_version=allow_unknown_version,
                logger=logger,
            )
        )

    def _wait(self, work: Coroutine[object, object, T]) -> T:
        with self._lock:  # the loop is not left between the question and the call
            if self._closed:
                work.close()
                raise ControllerClosed("the fleet was shut down: make a new one")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ControllerClosed("the fleet was shut down while this call waited") from None
        except BaseException:
            future.cancel()  # the caller was interrupted
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """See `Fleet.shutdown`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join()

    def release(self) -> CycleReport:
        """See `Fleet.release`."""
        return self._wait(self._fleet.release())

    def resume(self) -> CycleReport:
        """See `Fleet.resume`."""
        return self._wait(self._fleet.resume())

    def refit(
        self,
        weights: Weights,
        version: int,
        *,
        before_push: Callable[[], None] | None = None,
        after_push: Callable[[], None] | None = None,
    ) -> CycleReport:
        """See `Fleet.refit`. Hooks are called in the calling thread, which may hold a GPU context."""
        if before_push is not None:

            async def check() -> None:
                self._fleet.check_refit(version)

            self._wait(check())
            called_plainly(before_push)
        if after_push is None:
            return self._wait(self._fleet.refit(weights, version))
        staged = self.stage(weights, version)
        called_plainly(after_push)
        return joined(staged, self.commit(version))

    def stage(self, weights: Weights, version: int) -> CycleReport:
        """See `Fleet.stage`."""
        return self._wait(self._fleet.stage(weights, version))

    def commit(self, version: int) -> CycleReport:
        """See `Fleet.commit`."""
        return self._wait(self._fleet.commit(version))

    def invalidate_kv_cache(self) -> CycleReport:
        """See `Fleet.invalidate_kv_cache`."""
        return self._wait(self._fleet.invalidate_kv_cache())

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: Mapping[str, object] | None = None,
        *,
        timeout_s: float = GENERATE_S,
        wait_s: float = 0.0,
        **options: object,
    ) -> Generation:
        """See `Fleet.generate`."""
        return self._wait(
            self._fleet.generate(prompt, sampling_params, timeout_s=timeout_s, wait_s=wait_s, **options)
        )

    def status(self) -> FleetStatus:
        """See `Fleet.status`."""

        async def read() -> FleetStatus:
            return self._fleet.status()

        return self._wait(read())
