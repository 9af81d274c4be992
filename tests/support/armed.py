"""Faults that a test arms one by one, for the next call that a server gets."""

from refitfsm.sim.faults import Fault, parse_fault

HARMLESS_READS = ("/model_info", "/server_info", "/get_server_info", "/ready", "/health", "/generate")


class ArmedFaults:
    """A fault source for one server: what is armed befalls the next control call, once."""

    def __init__(self) -> None:
        self.armed: list[str] = []
        """KIND or KIND=ARG, as in a fault's words."""
        self.struck: list[tuple[str, str]] = []

    def draw(self, path: str) -> Fault | None:
        if not self.armed or path in HARMLESS_READS:
            return None
        kind = self.armed.pop(0)
        self.struck.append((path, kind))
        return parse_fault(f"{kind}@*:*")
