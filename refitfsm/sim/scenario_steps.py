"""What can be done in a scenario: the steps of a trainer, of a client without refitfsm, and of the world."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Version = Annotated[int, msgspec.Meta(ge=0, le=10_000)]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="do"):
    """One thing that is done."""

    after_s: Seconds | None = None
    """Begin so many seconds from now, beside the steps that follow. Left out: now, and wait for its end."""


# -- a trainer, through refitfsm ---------------------------------------------------------------------


class FleetStep(Step, frozen=True, kw_only=True):
    """Something asked of a fleet, by its owner."""

    by: str = "trainer"
    """Which controller: there may be several, each with a run of its own."""
    fails: str | None = None
    """It has to raise an error of ours with this in `NAME: MESSAGE`. Left out: it has to succeed."""
    may_fail: bool = False
    """It may succeed, or raise an error of ours."""


class Connect(FleetStep, tag="connect", frozen=True, kw_only=True):
    """Make the fleet, and enrol its servers."""

    servers: tuple[str, ...] = ()
    """Empty: all."""
    under: dict[str, str] = {}
    """Further names of servers that have one already: name -> server."""


class Leave(FleetStep, tag="leave", frozen=True, kw_only=True):
    """Shut the fleet down."""


class Release(FleetStep, tag="release", frozen=True, kw_only=True):
    """Give the memory to the trainer."""


class Resume(FleetStep, tag="resume", frozen=True, kw_only=True):
    """Serve again with the weights that were kept."""


class Weights(FleetStep, frozen=True, kw_only=True):
    """Something with weights: the tiny model's of one seed."""

    version: Version | None = None
    """Left out: one above the highest that was tried."""
    seed: Version | None = None
    """Left out: the version."""
    without: tuple[str, ...] = ()
    """Tensors that are left out."""
    renamed: dict[str, str] = {}
    """Tensors that are sent under other names: name -> other name."""


class Refit(Weights, tag="refit", frozen=True, kw_only=True):
    """Push a version, and serve it."""


class Stage(Weights, tag="stage", frozen=True, kw_only=True):
    """Push a version, and do not serve it yet."""


class Commit(FleetStep, tag="commit", frozen=True, kw_only=True):
    """Serve what was staged."""

    version: Version


class Flush(FleetStep, tag="flush", frozen=True, kw_only=True):
    """Empty every cache."""


class Generate(FleetStep, tag="generate", frozen=True, kw_only=True):
    """Requests through the fleet, all at once."""

    times: Count = 1
    prompt: tuple[int, ...] = (1, 2, 3)
    max_new_tokens: Count = 4
    wait_s: Seconds = 0.0


# -- a client without refitfsm -----------------------------------------------------------------------


class Raw(Step, frozen=True, kw_only=True):
    """One HTTP call to a server, past every fleet."""

    server: str
    """To whom."""
    answers: int | Literal["lost", "refused", "timeout"] | None = None
    """The status that has to come, or how there is to be none. Left out: whatever comes."""
    timeout_s: Seconds = 600.0
    """How long its answer is waited for."""


class Call(Raw, tag="call", frozen=True, kw_only=True):
    """Any call."""

    path: str
    method: Literal["GET", "POST"] = "POST"
    body: dict[str, object] = {}
    """JSON; a GET has none."""


class Ask(Raw, tag="ask", frozen=True, kw_only=True):
    """A request for tokens."""

    prompt: tuple[int, ...] = (1, 2, 3)
    max_new_tokens: Count = 4


class Push(Raw, tag="push", frozen=True, kw_only=True):
    """Weights of one version, as a list of tensors. A session, if there is to be one, is two calls."""

    version: Version
    chunks: tuple[int, ...] = ()
    """Which of the chunks, from 0; empty: all."""
    renamed: dict[str, str] = {}
    label: bool = True
    """Send the version with the last of the chunks."""
    flush_cache: bool = False
    """Whether the server flushes in the same call."""
    payloads: Count | None = None
    """How many are sent, one a rank; left out: one for each rank."""


# -- the world ---------------------------------------------------------------------------------------


class Wait(Step, tag="wait", frozen=True, kw_only=True):
    """Let time pass."""

    seconds: Seconds


class Repeat(Step, frozen=True, kw_only=True, tag="repeat"):
    """Some steps, several times over."""

    times: Count
    steps: tuple["AnyStep", ...]


class Settle(Step, tag="settle", frozen=True, kw_only=True):
    """Wait for the end of everything that was begun beside."""


class Cancel(Step, tag="cancel", frozen=True, kw_only=True):
    """Cancel everything that was begun beside."""


class Take(Step, tag="take", frozen=True, kw_only=True):
    """A process takes memory of a GPU. What it does not get is seen as `trainer_has_no_room`."""

    gpu: str
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    holder: str = "trainer"


class GiveBack(Step, tag="give_back", frozen=True, kw_only=True):
    """A process gives all its memory of a GPU back."""

    gpu: str
    holder: str = "trainer"


class OfServer(Step, frozen=True, kw_only=True):
    """Something done to a server from outside."""

    server: str


class Kill(OfServer, tag="kill", frozen=True, kw_only=True):
    """Kill its processes."""


class KillScheduler(OfServer, tag="kill_scheduler", frozen=True, kw_only=True):
    """Kill its scheduler only."""


class Restart(OfServer, tag="restart", frozen=True, kw_only=True):
    """Start it anew at its address, with the weights that it starts with."""


class Freeze(OfServer, tag="freeze", frozen=True, kw_only=True):
    """Stop its scheduler, as SIGSTOP does."""


class Thaw(OfServer, tag="thaw", frozen=True, kw_only=True):
    """Let its scheduler go on."""


class Arm(OfServer, tag="arm", frozen=True, kw_only=True):
    """A fault that counts calls from now on, in the words of `faults`."""

    fault: str


AnyStep = (
    Connect
    | Leave
    | Release
    | Resume
    | Refit
    | Stage
    | Commit
    | Flush
    | Generate
    | Call
    | Ask
    | Push
    | Wait
    | Repeat
    | Settle
    | Cancel
    | Take
    | GiveBack
    | Kill
    | KillScheduler
    | Restart
    | Freeze
    | Thaw
    | Arm
)


def flat(steps: Iterable[AnyStep]) -> Iterator[AnyStep]:
    """All steps, those that are repeated as well, each once."""
    for step in steps:
        yield step
        if isinstance(step, Repeat):
            yield from flat(step.steps)
