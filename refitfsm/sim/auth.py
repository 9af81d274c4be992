"""API keys: which calls need which one."""

import hmac
from enum import Enum

from refitfsm.sim.config import SimConfig
from refitfsm.sim.wire import HttpRequest

_EXEMPT = ("/health", "/metrics")


class Level(Enum):
    """What a route asks for."""

    NORMAL = "normal"
    """The API key, if one is set."""
    ADMIN_OPTIONAL = "admin_optional"
    """The admin key, if one is set; else the API key, if one is set."""


def allowed(request: HttpRequest, level: Level, config: SimConfig, *, ready_exempt: bool) -> bool:
    """Whether the request carries the key that its route asks for."""
    if not config.api_key and not config.admin_api_key:
        return True
    exempt = (*_EXEMPT, "/ready") if ready_exempt else _EXEMPT
    if request.method == "OPTIONS" or request.path.startswith(exempt):
        return True
    wanted = config.api_key
    if level is Level.ADMIN_OPTIONAL and config.admin_api_key:
        wanted = config.admin_api_key
    return not wanted or _bearer(request.authorization, wanted)


def _bearer(header: str | None, key: str) -> bool:
    scheme, _, token = (header or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), key.encode())
