"""A generation request inside a simulated scheduler, and the record of the answer it leaves."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from refitfsm.sim.front import Reading
from refitfsm.sim.kv import KvSpan


class Phase(StrEnum):
    """Where the scheduler has a request."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class TokenSpan(NamedTuple):
    """A run of answer tokens, `start` inclusive to `end` exclusive, and what they have in common."""

    label: str
    """A weights digest, or a version, by the list it stands in."""
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated."""

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    probe: bool = False
    """A health probe or a warm-up: nobody reads what it says."""
    phase: Phase = Phase.WAITING
    abort_asked: bool = False
    client_gone_s: float | None = None
    """Set when nobody waits for it any more: how long its server takes to notice."""
    tokens: list[int] = field(default_factory=list)
    context: bytes = b""
    weights: list[TokenSpan] = field(default_factory=list)
    """Which weights made which tokens."""
    versions: list[TokenSpan] = field(default_factory=list)
    """Which version the scheduler had on its label meanwhile."""
    kv: list[KvSpan] = field(default_factory=list)
    """The KV entries it attends to; empty before its prefill and after a retraction."""
    kv_read: list[str] = field(default_factory=list)
    """Other weights than those computing, whose KV entries it has attended to."""
    cached_tokens: int = 0
    retractions: int = 0
    lead_s: float = 0.0
    """Time already spent on the step it is in; negative while its prefill lasts."""
    computing: str = ""
    """Digest of the weights of the current run of steps."""
    seed: bytes | None = None

    def sequence(self) -> tuple[int, ...]:
        """Prompt and answer so far."""
        return (*self.prompt, *self.tokens)


@dataclass(slots=True, eq=False)
class Job:
    """One /generate call."""

    requests: list[Request]
    batch: bool = False
    """A list is answered, even of one."""
    logprobs: bool = False
    stream: bool = False
    started_s: float = 0.0
    reading: Reading | None = None


class Answer(NamedTuple):
    """What one request was told, and by which weights: written once, when it ends."""

    rid: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    weights: tuple[TokenSpan, ...]
    """Digests of the weights that made the tokens; `truth.UNDEFINED` where they were not defined."""
    kv_read: tuple[str, ...]
    """Digests of other weights whose KV entries took part; empty in a clean answer."""
    version: str
    """The version label the client was given."""
    aborted: bool
    incarnation: int


def extend(spans: list[TokenSpan], label: str, start: int, end: int) -> None:
    """Add tokens to a list of spans, lengthening the last one where the label is the same."""
    if spans and spans[-1].label == label:
        spans[-1] = TokenSpan(label, spans[-1].start, end)
    else:
        spans.append(TokenSpan(label, start, end))
