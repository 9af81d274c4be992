"""The values that cross every boundary: commands, events, and the view held of a server.

All are NamedTuples: immutable, hashable, cheap to make by the million (the explorer does).
"""

from enum import StrEnum
from typing import NamedTuple

from refitfsm.model.states import ALL_TAGS, Condition, ContentKind, Gate, ServerState, Tag


class CommandKind(StrEnum):
    """What a driver can be asked to do to one server."""

    ENROL = "enrol"
    DRAIN = "drain"
    PAUSE = "pause"
    FLUSH = "flush"
    RELEASE = "release"
    RESUME = "resume"
    BEGIN = "begin"
    PUSH = "push"
    END = "end"
    VERIFY = "verify"
    CONTINUE = "continue"


class VerifyLevel(StrEnum):
    """How much proof of content a commit asks for."""

    VERSION = "version"
    """The version label is read back from the server."""
    SAMPLE = "sample"
    """Also, a few tensors are read back, and begin with the values that were pushed."""
    CHECKSUM = "checksum"
    """Also the checksum of the weights in memory, equal on all servers of the fleet."""
    CONTENT = "content"
    """Also, each tensor's checksum is that of the weights that were pushed, as the sender computes it;
    what no checksum covers is sampled."""

    @property
    def needs_checksums(self) -> bool:
        """Whether the server has to make checksums for it."""
        return self in (VerifyLevel.CHECKSUM, VerifyLevel.CONTENT)


class Command(NamedTuple):
    """One thing to do to one server. Fields that a kind does not use keep their defaults."""

    kind: CommandKind
    tags: frozenset[Tag] = frozenset()
    """release, resume: exactly these tags."""
    version: int = 0
    """push, verify: the weight version being put in place; continue: the version to serve."""
    chunk: int = 0
    """push: index of the chunk, from 0."""
    chunks: int = 0
    """push: how many chunks make the whole model."""
    chunk_bytes: int = 0
    """push: bytes of this chunk."""
    level: VerifyLevel = VerifyLevel.VERSION
    """verify: how much proof."""


class EventName(StrEnum):
    """Everything that can happen to a server: a command is asked for, a command ended, it died."""

    ENROL = "enrol"
    DRAIN = "drain"
    PAUSE = "pause"
    FLUSH = "flush"
    RELEASE = "release"
    RESUME = "resume"
    BEGIN = "begin"
    PUSH = "push"
    END = "end"
    VERIFY = "verify"
    CONTINUE = "continue"

    ENROLLED = "enrolled"
    DRAINED = "drained"
    PAUSED = "paused"
    FLUSHED = "flushed"
    RELEASED = "released"
    RESUMED = "resumed"
    BEGUN = "begun"
    PUSHED = "pushed"
    ENDED = "ended"
    VERIFIED = "verified"
    CONTINUED = "continued"

    REFUSED = "refused"
    FAILED = "failed"
    LOST = "lost"
    DIED = "died"
    UNCOMMITTED = "uncommitted"
    """The cycle ended without a commit."""


REQUESTS: tuple[EventName, ...] = tuple(EventName(kind.value) for kind in CommandKind)
"""Events that ask for a command: the planner's own, judged before anything is sent."""

DONE: dict[CommandKind, EventName] = dict(
    zip(
        CommandKind,
        (
            EventName.ENROLLED,
            EventName.DRAINED,
            EventName.PAUSED,
            EventName.FLUSHED,
            EventName.RELEASED,
            EventName.RESUMED,
            EventName.BEGUN,
            EventName.PUSHED,
            EventName.ENDED,
            EventName.VERIFIED,
            EventName.CONTINUED,
        ),
        strict=True,
    )
)
"""The event that says a command of this kind ended well."""


class Capabilities(NamedTuple):
    """What a server can do and who it is, as read from it at enrolment."""

    sglang_version: str = ""
    sessions: bool = False
    """Weight updates need a session around them (0.5.21 and later)."""
    memory_saver: bool = False
    weights_backup: bool = False
    """Released weights come back from host memory."""
    checksums: bool = False
    tp_size: int = 1
    loader: bool = False
    """Started with `refitfsm.server.loader`: it can copy registered weights again at a word."""
    weights_bytes: int = 0
    """What a rank's weights take of its GPU, as the server measured it at its start; 0: not known."""
    kv_cache_bytes: int = 0
    on_cpu: bool = False
    """It computes on the CPU, where checksums are made otherwise than on a GPU."""
    model_path: str = ""
    weight_label: str = ""
    """The label of weights that some run pushed, as found at enrolment; empty: start-up weights."""
    start_label: str = ""
    """The label that the server was started with; empty where an enrolment has replaced it."""
    incarnation: str = ""
    """Changes when the server's process is started again; empty if the server shows nothing like it."""


class Content(NamedTuple):
    """What the weights in the server's memory are believed to be."""

    kind: ContentKind = ContentKind.UNDEFINED
    version: int = -1
    """complete: the version; partial: the version on its way; undefined: -1."""
    cycle: int = 0
    """The cycle that pushed it."""
    chunks_done: int = 0
    chunks_total: int = 0
    proved: bool = False
    """The verification that the policy asks for has passed since the last write."""


class Pending(NamedTuple):
    """The one command in flight."""

    command: Command
    cycle: int
    seq: int
    deadline_s: float


class ServerView(NamedTuple):
    """What the controller believes of one server. Each field is a fact of its own."""

    server: str
    """Its name: the URL."""
    state: ServerState = ServerState.OFFLINE
    resident: frozenset[Tag] = frozenset()
    """Tags confirmed resident; a tag in neither set is not known."""
    released: frozenset[Tag] = frozenset()
    """Tags confirmed released."""
    content: Content = Content()
    kv_epoch: int | None = None
    """The weight version the cache may hold entries of; None: the cache is confirmed empty."""
    gate: Gate = Gate.CLOSED
    paused: bool = False
    """Generation is confirmed paused."""
    session: int = 0
    """The cycle that opened the weight-update session; 0: none is open; -1: somebody else's is."""
    pending: Pending | None = None
    seq: int = 0
    """Number of the last command; never repeats."""
    attempts: int = 0
    """Commands without an answer since the last that ended well."""
    capabilities: Capabilities = Capabilities()
    checksum: str = ""
    """Of the weights in memory, when a verification read it; empty otherwise."""
    condition: Condition = Condition.HEALTHY
    reason: str = ""
    """Why the condition or the state is what it is, in words."""

    @property
    def everything_resident(self) -> bool:
        return self.resident == ALL_TAGS


class Report(NamedTuple):
    """What an answer said, beside that the command ended well."""

    capabilities: Capabilities = Capabilities()
    """enrolled."""
    paused: bool = False
    """enrolled: the server says that it is paused."""
    session_open: bool = False
    """refused: the server says that a weight-update session is open already."""
    session_closed: bool = False
    """refused: the server says that no weight-update session is open."""
    version: int = -1
    """verified: the version that the label read back stands for; -1: none of ours."""
    checksum: str = ""
    """verified: the checksum, if it was asked for."""
    in_flight: int = 0
    """drained: requests still running when the budget ended."""


NOTHING_REPORTED = Report()


class Event(NamedTuple):
    """Something that happened to one server, as input to the table."""

    name: EventName
    command: Command | None = None
    """requests: what is asked for."""
    cycle: int = 0
    """requests: the cycle that asks; answers: the cycle of the command that is answered."""
    seq: int = 0
    """answers: the number of the command that is answered."""
    deadline_s: float = 0.0
    """requests: when the command counts as lost."""
    report: Report = NOTHING_REPORTED
    detail: str = ""
    """The server's last words, or why nothing came."""


class Facts(NamedTuple):
    """What a guard may know of the fleet around the server."""

    serving_version: int = 0
    """The version that the fleet serves; moves only at a fleet commit."""
    cycle: int = 0
    """The open cycle, or 0."""
    serving_push: int = 0
    """The cycle that pushed the weights that the fleet serves; 0: it serves what servers start with.

    Other weights may have been pushed under the same version, by a cycle that did not commit."""
