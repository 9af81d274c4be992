"""The way into a simulated server without a network, with the faults a network has."""

from functools import lru_cache
from urllib.parse import parse_qsl

from refitfsm.drivers.transport import Reply
from refitfsm.sim.faults import Fault, FaultPlan, FaultSource, Kind, parse_fault
from refitfsm.sim.faulty import deliver
from refitfsm.sim.server import SimServer, request_of
from refitfsm.sim.wire import HttpReply

__all__ = ["Fault", "FaultPlan", "FaultSource", "Kind", "SimTransport", "parse_fault"]


@lru_cache(maxsize=256)
def split_path(path: str) -> tuple[str, dict[str, str]]:
    """A path and its query, which may follow a question mark. Do not change the result: it is shared."""
    bare, _, query = path.partition("?")
    return bare, dict(parse_qsl(query, keep_blank_values=True))


class SimTransport:
    """A `refitfsm.drivers.transport.Transport` into one server."""

    def __init__(self, server: SimServer, faults: FaultSource | None = None, *, api_key: str = "") -> None:
        self.server = server
        self.faults = faults
        self._headers: dict[str, str] | None = None
        if api_key:
            self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}

    async def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """Send one request and wait for its whole answer; `path` may carry a query.

        Raises:
            NotSent: nothing listens, or a fault refused the connection.
            AnswerLost: the server died, or a fault broke the connection.
        """
        bare, query = split_path(path)
        fault = self.faults.draw(bare) if self.faults is not None else None
        response = await deliver(self.server, request_of(method, bare, query, body, self._headers), fault)
        if isinstance(response, HttpReply):
            return response.plain()
        return Reply(200, b"".join([event async for event in response]))

    async def aclose(self) -> None:
        """Nothing to release."""
