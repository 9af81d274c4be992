"""The table of HTTP routes that a release has, with the methods and the key each asks for."""

from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Final, NamedTuple

from refitfsm.sim import control_routes as control
from refitfsm.sim import info_routes as info
from refitfsm.sim import weight_routes as weights
from refitfsm.sim.auth import Level
from refitfsm.sim.engine import Engine
from refitfsm.sim.profiles import SimProfile
from refitfsm.sim.wire import HttpReply, HttpRequest

Handler = Callable[[Engine, HttpRequest], Coroutine[object, object, HttpReply]]

GENERATE: Final = "/generate"


class Route(NamedTuple):
    """One path."""

    methods: tuple[str, ...]
    level: Level
    handler: Handler | None
    """None for /generate, which the server runs itself."""


_GET: Final = ("GET",)
_POST: Final = ("POST",)
_BOTH: Final = ("GET", "POST")
_NORMAL: Final = Level.NORMAL
_ADMIN: Final = Level.ADMIN_OPTIONAL

_ALWAYS: Final[dict[str, Route]] = {
    "/health": Route(_GET, _NORMAL, info.health),
    "/health_generate": Route(_GET, _NORMAL, info.health),
    "/model_info": Route(_GET, _NORMAL, info.model_info),
    "/get_model_info": Route(_GET, _NORMAL, info.model_info),
    "/server_info": Route(_GET, _NORMAL, info.server_info),
    "/get_server_info": Route(_GET, _NORMAL, info.server_info),
    "/v1/loads": Route(_GET, _NORMAL, info.loads),
    GENERATE: Route(("POST", "PUT"), _NORMAL, None),
    "/release_memory_occupation": Route(_BOTH, _ADMIN, control.release),
    "/resume_memory_occupation": Route(_BOTH, _ADMIN, control.resume),
    "/flush_cache": Route(_BOTH, _ADMIN, control.flush),
    "/pause_generation": Route(_POST, _ADMIN, control.pause),
    "/continue_generation": Route(_POST, _ADMIN, control.go_on),
    "/abort_request": Route(_POST, _ADMIN, control.abort),
    "/update_weight_version": Route(_POST, _ADMIN, control.new_version),
    "/slow_down": Route(_BOTH, _ADMIN, control.slow_down),
    "/update_weights_from_tensor": Route(_POST, _ADMIN, weights.update_from_tensor),
    "/update_weights_from_disk": Route(_POST, _ADMIN, weights.update_from_disk),
    "/update_weights_from_distributed": Route(_POST, _ADMIN, weights.update_from_distributed),
    "/update_weights_from_ipc": Route(_POST, _ADMIN, weights.update_from_ipc),
    "/init_weights_update_group": Route(_POST, _ADMIN, weights.init_group),
    "/destroy_weights_update_group": Route(_POST, _ADMIN, weights.destroy_group),
    "/get_weights_by_name": Route(_BOTH, _ADMIN, weights.get_weights),
}


@lru_cache(maxsize=32)
def routes_of(profile: SimProfile) -> dict[str, Route]:
    """Path -> route for one release. Shared between servers: do not change it."""
    table = dict(_ALWAYS)
    table["/weights_checker"] = Route(_BOTH if profile.checker_takes_get else _POST, _ADMIN, weights.check)
    if profile.has_ready:
        table["/ready"] = Route(_GET, _NORMAL, info.ready)
    if profile.has_get_load:
        table["/get_load"] = Route(_GET, _NORMAL, info.get_load)
    if profile.sessions_required:
        table["/begin_weight_update"] = Route(_POST, _ADMIN, weights.begin)
        table["/end_weight_update"] = Route(_POST, _ADMIN, weights.end)
    if profile.weight_version_route_retired:
        table["/get_weight_version"] = Route(_GET, _NORMAL, info.retired_version)
        table["/weight_version"] = Route(_GET, _NORMAL, info.retired_version)
    return table
