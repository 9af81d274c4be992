"""What a driver is: it carries out commands and reports what it saw."""

from typing import NamedTuple, Protocol

from refitfsm.model.records import Issued
from refitfsm.model.values import NOTHING_REPORTED, EventName, Report


class Observation(NamedTuple):
    """How a command ended: one of its good ends, or refused, failed, lost, or the server died."""

    event: EventName
    detail: str = ""
    """The server's last words, or why nothing came. Never a key."""
    report: Report = NOTHING_REPORTED


class ServerGone(Exception):
    """Nobody listens at the server's address any more."""


class Driver(Protocol):
    """Carries out commands on one server. Called from one event loop, one command at a time."""

    async def execute(self, issued: Issued) -> Observation:
        """Carry out one command.

        Expected trouble is an observation and never an exception. May be cancelled at any await: the
        caller then counts the command as lost.
        """
        ...

    async def generate(self, body: bytes, timeout_s: float) -> bytes:
        """Post a request to the server's /generate and return the answer's body.

        Raises:
            ServerGone: its process is gone, before the request or during it.
            RequestFailed: no answer, or an answer that is an error.
        """
        ...

    async def aclose(self) -> None:
        """Release connections. Idempotent."""
        ...
