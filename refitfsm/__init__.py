"""An explicit state machine between an RL trainer and its SGLang servers."""

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
