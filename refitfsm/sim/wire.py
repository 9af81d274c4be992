"""Requests and replies of the simulated HTTP face, and the shapes SGLang's replies have."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from refitfsm.drivers.transport import Reply

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"

_encode = msgspec.json.Encoder().encode


class HttpRequest(NamedTuple):
    """One request, its body not decoded."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes | None
    is_json: bool
    """Whether its content type says JSON."""
    authorization: str | None


class HttpReply(NamedTuple):
    """One reply, ready to be sent."""

    status: int
    body: bytes
    content_type: str | None = JSON

    def plain(self) -> Reply:
        """Status and body only, as a `Transport` gives them."""
        return Reply(self.status, self.body)


def json_reply(value: object, status: int = 200) -> HttpReply:
    """A JSON reply."""
    return HttpReply(status, _encode(value))


def text_reply(text: str, status: int = 200) -> HttpReply:
    """A text reply."""
    return HttpReply(status, text.encode(), TEXT)


def empty_reply(status: int = 200) -> HttpReply:
    """A reply with no body."""
    return HttpReply(status, b"", None)


def outcome(success: bool, message: str, **more: object) -> HttpReply:
    """How weight calls answer: 200 or 400, with `success` and `message`."""
    return json_reply({"success": success, "message": message, **more}, 200 if success else 400)


def error_reply(message: str, status: int = 400) -> HttpReply:
    """How a failure inside the HTTP process answers."""
    return json_reply({"error": {"message": message}}, status)


def invalid_body(kind: str, location: tuple[str | int, ...], reason: str) -> HttpReply:
    """How a body that does not fit answers: 400, never 422."""
    message = f"1 validation error:\n  {{'type': '{kind}', 'loc': {location!r}, 'msg': '{reason}'}}"
    return json_reply(
        {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}, 400
    )


def retired(detail: str) -> HttpReply:
    """How a route that is kept only to say it is gone answers."""
    return json_reply({"object": "error", "message": detail, "type": "404", "param": None, "code": 404}, 404)


NULL: Final = HttpReply(200, b"null")
NOT_FOUND: Final = json_reply({"detail": "Not Found"}, 404)
WRONG_METHOD: Final = json_reply({"detail": "Method Not Allowed"}, 405)
UNAUTHORIZED: Final = json_reply({"error": "Unauthorized"}, 401)
