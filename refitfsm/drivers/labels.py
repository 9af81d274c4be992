"""The version label that servers carry: which run wrote the weights, and which version they are.

    refitfsm:RUN:VERSION                 after a push
    refitfsm:RUN:0:ADDRESS:BEFORE        after an enrolment: the start-up weights

A restart resets a server's label, so the label also tells whether the process behind an address is
still the one that was enrolled. It is read with GET /model_info, which never kills and never waits.
ADDRESS stands for the address the server was enrolled under: one server under two addresses has the
label of the second, and the first is found out. BEFORE is the label that the enrolment replaced, so that
what it said of the weights is not lost.
"""

import hashlib

PREFIX = "refitfsm"


def label(run_id: str, version: int) -> str:
    """The label of a version that a run pushed."""
    return f"{PREFIX}:{run_id}:{version}"


def stamp(run_id: str, server: str, before: str) -> str:
    """The label that an enrolment writes."""
    address = hashlib.sha256(server.encode()).hexdigest()[:8]
    _, _, older = _stamped(before)
    return f"{label(run_id, 0)}:{address}:{older if older is not None else before}"


def _stamped(text: str) -> tuple[str, str, str | None]:
    """A label's run and version, and what an enrolment found before it; None if it is no stamp."""
    parts = text.split(":", 4)
    if parts[0] != PREFIX or len(parts) < 3:
        return "", "", None
    return parts[1], parts[2], parts[4] if len(parts) == 5 else None


def origin(text: str) -> tuple[str, str]:
    """A label found at enrolment, as (label of weights that a run pushed, label of the server's start)."""
    _, _, before = _stamped(text)
    if before is not None:
        return origin(before)
    return (text, "") if text.startswith(PREFIX + ":") else ("", text)


def version_of(text: str, run_id: str) -> int:
    """The version that a label of this run stands for, or -1."""
    run, number, _ = _stamped(text)
    if run != run_id or not number.isascii() or not number.isdigit():
        return -1
    return int(number)
