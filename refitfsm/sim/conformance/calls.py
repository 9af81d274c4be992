"""Calls that a differential run draws from, legal and illegal, each with what is compared of its answer."""

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

from refitfsm.drivers.transport import TransportError
from refitfsm.model.values import CommandKind
from refitfsm.sim.conformance.subject import ENDLESS_TOKENS, Answer, Subject, asking, zeros

Say = Callable[[Subject], Awaitable[str]]
"""Makes a call; what comes of it, in words that must be the same on both servers."""
DEAD: Final = "dead"
"""The answer was lost, or nobody listens."""
UNANSWERED: Final = "unanswered"
"""Nothing in a minute, where there is something to wait for."""
TOKENS: Final = 3


class Call(NamedTuple):
    """One call."""

    name: str
    say: Say
    weight: int = 1
    """How often it is drawn, beside the others."""


def told(answer: Answer) -> str:
    """The status, and of a JSON object whether it says success, or what kind of error it is."""
    value = answer.value
    if not isinstance(value, dict):
        return f"{answer.status} {value!r:.40}"
    kept = {name: value[name] for name in ("success", "status", "object") if name in value}
    return f"{answer.status} {kept}"


def _http(path: str, body: object = msgspec.UNSET, method: str = "POST") -> Say:
    async def say(subject: Subject) -> str:
        if method == "GET":
            return str((await subject.get(path)).status)
        return told(await subject.post(path, body))

    return say


def _update(name: str, **more: object) -> Say:
    """An update with two zeros under this name."""

    async def say(subject: Subject) -> str:
        body = subject.update(zeros((name, (2,))), **more)
        return told(await subject.post("/update_weights_from_tensor", body))

    return say


async def _push(subject: Subject) -> str:
    """The other weights, whole, as the driver pushes them."""
    load = subject.load(1)
    subject.driver.load = load
    for chunk in load.chunks:
        found = await subject.do(CommandKind.PUSH, version=1, chunk=chunk.index, chunks=chunk.count)
        if found.event.value != "pushed":
            break
    return str(found.event.value)


def _generate(count: int) -> Say:
    async def say(subject: Subject) -> str:
        answer = await subject.post("/generate", asking(count))
        if answer.status != 200:
            return told(answer)
        return f"200 {answer.finish}"

    return say


async def _greedy(subject: Subject) -> str:
    """A short request, and whose weights answered it."""
    answer = await subject.post("/generate", asking(TOKENS))
    if answer.status != 200:
        return told(answer)
    return f"200 {answer.finish}" if answer.finish != "length" else f"200 {subject.whose(answer.tokens)}"


def _tags(path: str, *tags: str) -> Say:
    return _http(path, {"tags": list(tags)} if tags else {})


_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"
ASK: Final = Call("ask", _greedy, 4)
CALLS: Final = (
    ASK,
    Call("ask for much", _generate(ENDLESS_TOKENS), 2),
    Call("pause", _http("/pause_generation", {}), 4),
    Call("pause in place", _http("/pause_generation", {"mode": "in_place"}), 2),
    Call("pause, retracting", _http("/pause_generation", {"mode": "retract"}), 2),
    Call("pause of no kind", _http("/pause_generation", {"mode": "nonsense"})),
    Call("continue", _http("/continue_generation", {}), 4),
    Call("flush", _http("/flush_cache"), 4),
    Call("flush, waiting", _http("/flush_cache?timeout=0.2")),
    Call("abort all", _http("/abort_request", {"abort_all": True}), 2),
    Call("abort nobody", _http("/abort_request", {"rid": "nobody"})),
    Call("release the cache", _tags(_RELEASE, "kv_cache"), 3),
    Call("release the weights", _tags(_RELEASE, "weights"), 3),
    Call("release all", _tags(_RELEASE), 2),
    Call("release what nobody knows", _tags(_RELEASE, "nonsense")),
    Call("release of no tags", _http(_RELEASE, {"tags": 7})),
    Call("resume the cache", _tags(_RESUME, "kv_cache"), 3),
    Call("resume the weights", _tags(_RESUME, "weights"), 3),
    Call("resume all", _tags(_RESUME), 2),
    Call("resume what nobody knows", _tags(_RESUME, "nonsense")),
    Call("begin", _http("/begin_weight_update", {}), 4),
    Call("end", _http("/end_weight_update", {}), 4),
    Call("push", _push, 4),
    Call("push a name that is not there", _update("model.nope.weight"), 2),
    Call("push and flush", _update("model.nope.weight", flush_cache=True), 2),
    Call("push a wrong shape", _update("model.norm.weight")),
    Call("push of no format", _update("model.nope.weight", load_format="bogus")),
    Call("push without a payload", _http("/update_weights_from_tensor", {})),
    Call("new label", _http("/update_weight_version", {"new_version": "x", "abort_all_requests": False})),
    Call("new label, aborting", _http("/update_weight_version", {"new_version": "y"})),
    Call("model info", _http("/model_info", method="GET")),
    Call("server info", _http("/server_info", method="GET")),
    Call("loads", _http("/v1/loads", method="GET")),
    Call("a path that is not there", _http("/nonsense", {})),
)
"""Some need a process that is asked for by its label: a new label keeps the driver's push from being sent."""


async def made(call: Call, subject: Subject) -> str:
    """Make a call; `DEAD` where it is the end of the server, `UNANSWERED` where nothing is."""
    try:
        return await call.say(subject)
    except TransportError:
        return DEAD
    except TimeoutError:
        return UNANSWERED
