"""What each command is: whether it may be repeated, and what is known when its answer is lost.

Before a pause, a release, a resume, a session, a chunk or a continue the driver reads the server's label
with GET /model_info: a command meant for one process is not sent to the next one at its address.

The retry rules, the deadlines' names and the documentation are read from here.
"""

from enum import StrEnum
from typing import NamedTuple

from refitfsm.model.values import CommandKind


class LostMeans(StrEnum):
    """What is known when a command ends without an answer that can be believed."""

    REPEAT = "repeat"
    """Doing it again does no harm, so it is done again."""
    RESIDENCY_UNKNOWN = "residency_unknown"
    """SGLang cannot be asked which tags are released, and dies of a repeat: the server is suspect."""
    CONTENT_UNKNOWN = "content_unknown"
    """Weights may have been written, now or later: the server is suspect, its content partial."""


class CommandSpec(NamedTuple):
    """One kind of command: what a driver does, and what a lost answer means."""

    lost_means: LostMeans
    does: str
    """What is sent, for the reference page."""
    succeeds_when: str
    """The evidence asked for, beside the status."""


COMMANDS: dict[CommandKind, CommandSpec] = {
    CommandKind.ENROL: CommandSpec(
        LostMeans.REPEAT,
        "read /server_info, /model_info, and /ready or /health; POST /update_weight_version with a label by"
        " which the process is known again",
        "version known, warm-up over, capabilities read",
    ),
    CommandKind.DRAIN: CommandSpec(
        LostMeans.REPEAT,
        "nothing is sent: this controller's gate closes and its requests in flight are waited for",
        "the gate counts no request, or the budget is used up (the pause then aborts the rest)",
    ),
    CommandKind.PAUSE: CommandSpec(
        LostMeans.REPEAT,
        'POST /pause_generation {"mode": "abort"}',
        "200, which SGLang sends when every request it had has been answered",
    ),
    CommandKind.FLUSH: CommandSpec(
        LostMeans.REPEAT,
        "POST /flush_cache, repeated while the server says that it is not idle yet",
        "200: the cache is empty and the scheduler is idle",
    ),
    CommandKind.RELEASE: CommandSpec(
        LostMeans.RESIDENCY_UNKNOWN,
        "POST /release_memory_occupation with the exact tags",
        "200",
    ),
    CommandKind.RESUME: CommandSpec(
        LostMeans.RESIDENCY_UNKNOWN,
        "POST /resume_memory_occupation with the exact tags",
        "200",
    ),
    CommandKind.BEGIN: CommandSpec(
        LostMeans.CONTENT_UNKNOWN,
        "POST /begin_weight_update",
        "200 with success true",
    ),
    CommandKind.PUSH: CommandSpec(
        LostMeans.CONTENT_UNKNOWN,
        "POST /update_weights_from_tensor, one payload per tensor parallel rank, flush_cache false; the last"
        " chunk carries the version label",
        "200 with success true",
    ),
    CommandKind.END: CommandSpec(
        LostMeans.CONTENT_UNKNOWN,
        "POST /end_weight_update",
        "200 with success true",
    ),
    CommandKind.VERIFY: CommandSpec(
        LostMeans.REPEAT,
        "GET /model_info, and /weights_checker where the policy asks for checksums",
        "the label read back is the one pushed",
    ),
    CommandKind.CONTINUE: CommandSpec(
        LostMeans.REPEAT,
        "POST /continue_generation",
        "200",
    ),
}
