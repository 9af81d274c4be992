"""Faults that a test arms one by one, for the next call that a server gets."""

from refitfsm.sim.faults import Fault, parse_fault

FATAL_TWICE = ("/release_memory_occupation", "/resume_memory_occupation")
"""Calls that kill a server when something between it and the client delivers them a second time."""
HARMLESS_READS = ("/model_info", "/server_info", "/get_server_info", "/ready", "/health", "/generate")


class ArmedFaults:
    """A fault source for one server: what is armed befalls the next control call, once."""

    def __init__(self) -> None:
        self.armed: list[str] = []
        """KIND or KIND=ARG, as in a fault's words."""
        self.struck: list[tuple[str, str]] = []
        self.doomed = False
        """A call was delivered twice that kills: the server's death is nobody's decision."""

    def draw(self, path: str) -> Fault | None:
        if not self.armed or path in HARMLESS_READS:
            return None
        kind = self.armed.pop(0)
        self.struck.append((path, kind))
        self.doomed = self.doomed or (kind == "duplicate" and path in FATAL_TWICE)
        return parse_fault(f"{kind}@*:*")
