"""How new weights reach a simulated server: pushed as tensors in a session, or read from disk."""

from collections.abc import Callable
from typing import NamedTuple

from refitfsm.sim.bodies import Begin, UpdateFromDisk, UpdateFromTensor
from refitfsm.sim.engine import Engine
from refitfsm.sim.payload import NamedSpecs, decode_entry
from refitfsm.sim.tensors import Undecodable
from refitfsm.sim.truth import Fatal, Session
from refitfsm.sim.weights import LoadError

_GB = 1e9


class Outcome(NamedTuple):
    """What an update answers."""

    success: bool
    message: str


NO_SESSION = "{} must run between begin_weight_update() and end_weight_update()"
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


async def begin(engine: Engine, body: Begin) -> Outcome:
    """Open the session; refused while one is open."""

    def act() -> Outcome:
        if engine.truth.session is not None:
            return Outcome(False, "a weight-update session is already open; call end_weight_update() first")
        engine.truth.session = Session(body.selector, loaded=False)
        return Outcome(True, "Success")

    return await _session_call(engine, "begin", act)


async def end(engine: Engine) -> Outcome:
    """Close the session; refused while none is open."""

    def act() -> Outcome:
        if engine.truth.session is None:
            return Outcome(False, "no weight-update session is open; call begin_weight_update() first")
        engine.truth.session = None
        return Outcome(True, "Success")

    return await _session_call(engine, "end", act)


async def _session_call(engine: Engine, label: str, act: Callable[[], Outcome]) -> Outcome:
    span = engine.config.timings.session_s
    return await engine.exclusively(lambda: engine.scheduler.control(label, span, act))


async def from_tensor(engine: Engine, body: UpdateFromTensor) -> Outcome:
    """Load one chunk of tensors on every rank."""
    if body.abort_all_requests:
        engine.scheduler.abort_all()
    size = sum(len(entry) for entry in body.serialized_named_tensors) * 3 / 4
    timings = engine.config.timings
    extra = engine.scheduler.draw("push_gb", timings.push_s_per_gb) * size / _GB

    def act() -> Outcome:
        if engine.profile.sessions_required and engine.truth.session is None:
            return Outcome(False, NO_SESSION.format("update_weights_from_tensor"))
        _load(engine, body)
        if engine.truth.session is not None:
            engine.truth.session = engine.truth.session._replace(loaded=True)
        return _loaded(engine, "Success", body.weight_version, flush=body.flush_cache)

    done = await engine.exclusively(
        lambda: engine.scheduler.change("push", timings.push_s, act, extra_s=extra),
        holds_gate=engine.profile.update_holds_gate,
    )
    return _versioned(engine, done, body.weight_version)


def _load(engine: Engine, body: UpdateFromTensor) -> None:
    entries = body.serialized_named_tensors
    ranks = engine.config.tp_size
    if len(entries) < ranks:
        raise Fatal("IndexError: list index out of range")
    for rank in range(ranks):
        _apply(engine, rank, _decoded(engine, entries[rank], body.load_format, rank), body.load_format)


def _decoded(engine: Engine, entry: str, load_format: str | None, rank: int) -> NamedSpecs:
    exact = engine.profile.exact_allow_list
    try:
        specs = decode_entry(entry, load_format=load_format, exact=exact, rank=rank)
    except Undecodable as error:
        raise Fatal(str(error)) from error
    if load_format not in {None, "direct", "flattened_bucket"}:
        raise Fatal(f"NotImplementedError: Unknown load_format={load_format}")
    return specs


def _apply(engine: Engine, rank: int, specs: NamedSpecs, load_format: str | None) -> None:
    direct = load_format == "direct"
    for name, spec in specs:
        engine.truth.apply(rank, name, spec, direct=direct)


def _loaded(engine: Engine, message: str, version: str | None, *, flush: bool) -> Outcome:
    """What follows every successful load: the scheduler's version, and the flush."""
    truth = engine.truth
    if version is not None:
        truth.version_scheduler = version
    if flush and not truth.flush():
        if engine.profile.refused_flush_kills:
            raise Fatal("AssertionError: Cache flush failed after updating weights")
        return Outcome(False, NOT_FLUSHED)
    return Outcome(True, message)


def _versioned(engine: Engine, done: Outcome, version: str | None) -> Outcome:
    """The front end takes a version over only with a success."""
    if not done.success or version is None:
        return done
    engine.truth.version_front = version
    return Outcome(True, f"{done.message} Weight version updated to {version}.")


async def from_disk(engine: Engine, body: UpdateFromDisk) -> Outcome:
    """Load a whole checkpoint; needs no session in any release."""
    if body.abort_all_requests:
        engine.scheduler.abort_all()
    config = engine.config
    checkpoints = {config.model_path: config.parameters, **config.checkpoints}
    found = checkpoints.get(body.model_path)
    if found is None:
        return Outcome(False, f"Failed to get weights iterator: {body.model_path!r} cannot be read.")
    extra = engine.scheduler.draw("load_gb", config.timings.load_s_per_gb)
    extra *= config.rank_weights_bytes() / _GB

    def act() -> Outcome:
        engine.truth.touch_weights("load")
        try:
            engine.truth.weights.replace(found)
        except LoadError as error:  # the real one "rolls back" by reading the same path again
            raise Fatal(str(error)) from error
        engine.model_path = engine.served_model_name = body.model_path
        return _loaded(
            engine, "Succeeded to update model weights.", body.weight_version, flush=body.flush_cache
        )

    done = await engine.exclusively(
        lambda: engine.scheduler.change("load", config.timings.push_s, act, extra_s=extra), holds_gate=False
    )
    return _versioned(engine, done, body.weight_version)
