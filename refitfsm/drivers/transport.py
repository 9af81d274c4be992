"""The seam between the SGLang protocol and the wire.

`drivers.sglang` speaks SGLang's protocol over any `Transport`. There are two: aiohttp for real
servers (`drivers.http`) and a call into a simulated server (`sim.transport`).
"""

from typing import NamedTuple, Protocol


class Reply(NamedTuple):
    """An HTTP answer: the status and the undecoded body."""

    status: int
    body: bytes


class TransportError(Exception):
    """No HTTP answer came back."""


class NotSent(TransportError):
    """The connection was refused: the server has seen nothing of the request."""


class Unreachable(TransportError):
    """The request could not be sent, which says nothing of the server: no file descriptor, no name found."""


class AnswerLost(TransportError):
    """The request left and the connection broke: whether it was applied is not known."""


class Transport(Protocol):
    """One server's HTTP interface."""

    async def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """Send one request and wait for its whole answer.

        `body` is JSON, already encoded. The caller bounds the wait with `asyncio.timeout`.

        Raises:
            NotSent: the connection was refused.
            Unreachable: it could not be sent for another reason.
            AnswerLost: the connection broke after the request was sent.
        """
        ...

    async def aclose(self) -> None:
        """Release connections. Idempotent."""
        ...
