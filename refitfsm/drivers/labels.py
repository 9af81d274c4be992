"""The version label that servers carry: which run wrote the weights, and which version they are.

A restart resets a server's label, so the label also tells whether the process behind an address is
still the one that was enrolled. It is read with GET /model_info, which never kills and never waits.
"""

PREFIX = "refitfsm"


def label(run_id: str, version: int) -> str:
    """The label of a version of a run."""
    return f"{PREFIX}:{run_id}:{version}"


def origin(text: str) -> tuple[str, str]:
    """A label found at enrolment, as (label of weights that a run pushed, label of the server's start).

    Version 0 of any run stands for the start-up weights: an enrolment wrote it, and no push.
    """
    prefix, _, number = text.rpartition(":")
    if not prefix.startswith(PREFIX + ":"):
        return "", text
    return ("", "") if number == "0" else (text, "")


def version_of(text: str, run_id: str) -> int:
    """The version that a label of this run stands for, or -1."""
    prefix, _, number = text.rpartition(":")
    if prefix != f"{PREFIX}:{run_id}" or not number.isascii() or not number.isdigit():
        return -1
    return int(number)
