"""An explicit state machine between an RL trainer and its SGLang servers."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitfsm.blocking import BlockingFleet
    from refitfsm.errors import (
        AuditError,
        CommandRefused,
        ConfigError,
        ControllerClosed,
        CycleAborted,
        DriverProtocolError,
        InvariantViolation,
        NotServing,
        RefitError,
        RequestFailed,
    )
    from refitfsm.fleet import Fleet
    from refitfsm.generation import Generation
    from refitfsm.model.states import Condition, ContentKind, Gate, ServerState, Tag
    from refitfsm.reports import CycleReport, FleetStatus
    from refitfsm.servers import ServerSpec

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "BlockingFleet",
    "CommandRefused",
    "Condition",
    "ConfigError",
    "ContentKind",
    "ControllerClosed",
    "CycleAborted",
    "CycleReport",
    "DriverProtocolError",
    "Fleet",
    "FleetStatus",
    "Gate",
    "Generation",
    "InvariantViolation",
    "NotServing",
    "RefitError",
    "RequestFailed",
    "ServerSpec",
    "ServerState",
    "Tag",
    "__version__",
]

# A server that loads with `refitfsm.server.loader` has torch, and none of what the rest of the package needs:
# a name is imported when it is first asked for.
_HOMES = {
    "AuditError": "refitfsm.errors",
    "BlockingFleet": "refitfsm.blocking",
    "CommandRefused": "refitfsm.errors",
    "Condition": "refitfsm.model.states",
    "ConfigError": "refitfsm.errors",
    "ContentKind": "refitfsm.model.states",
    "ControllerClosed": "refitfsm.errors",
    "CycleAborted": "refitfsm.errors",
    "CycleReport": "refitfsm.reports",
    "DriverProtocolError": "refitfsm.errors",
    "Fleet": "refitfsm.fleet",
    "FleetStatus": "refitfsm.reports",
    "Gate": "refitfsm.model.states",
    "Generation": "refitfsm.generation",
    "InvariantViolation": "refitfsm.errors",
    "NotServing": "refitfsm.errors",
    "RefitError": "refitfsm.errors",
    "RequestFailed": "refitfsm.errors",
    "ServerSpec": "refitfsm.servers",
    "ServerState": "refitfsm.model.states",
    "Tag": "refitfsm.model.states",
}

if not TYPE_CHECKING:  # checkers read the imports above

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(home), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
