"""The calls that write, check and read weights."""

from collections.abc import Callable
from math import prod
from typing import Final

from refitfsm.sim import updates
from refitfsm.sim.bodies import (
    Begin,
    Check,
    CheckExplicit,
    DestroyGroup,
    Empty,
    GetWeights,
    InitGroup,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromIpc,
    UpdateFromTensor,
    decode,
)
from refitfsm.sim.content import DTYPE_BYTES, TensorSpec, tensor_digest
from refitfsm.sim.engine import Engine
from refitfsm.sim.numbers import unpacked
from refitfsm.sim.payload import Lru, is_base64
from refitfsm.sim.truth import Fatal
from refitfsm.sim.wire import HttpReply, HttpRequest, error_reply, invalid_body, json_reply, outcome

_bodies: Final[Lru[bytes, tuple[UpdateFromTensor, int | None]]] = Lru(entries=8, weight=256 << 20)
_NO_CUDA: Final = "Torch not compiled with CUDA enabled"


async def update_from_tensor(engine: Engine, request: HttpRequest) -> HttpReply:
    """/update_weights_from_tensor."""
    parsed = _update_body(request)
    if isinstance(parsed, HttpReply):
        return parsed
    body, not_base64 = parsed
    if not_base64 is not None and not engine.profile.bad_base64_kills:
        where = ("body", "serialized_named_tensors", not_base64)
        return invalid_body("value_error", where, "Value error, Expected base64-encoded bytes")
    return outcome(*await updates.from_tensor(engine, body))


def _update_body(request: HttpRequest) -> tuple[UpdateFromTensor, int | None] | HttpReply:
    """The body, and which of its entries is not base64. Many servers are sent the same: it is read once."""
    known = _bodies.get(request.body) if request.body and request.is_json else None
    if known is not None:
        return known
    body = decode(request, UpdateFromTensor)
    if isinstance(body, HttpReply):
        return body
    wrong = [at for at, entry in enumerate(body.serialized_named_tensors) if not is_base64(entry)]
    parsed = (body, wrong[0] if wrong else None)
    if request.body:
        _bodies.put(request.body, parsed, len(request.body))
    return parsed


async def begin(engine: Engine, request: HttpRequest) -> HttpReply:
    """/begin_weight_update."""
    body = decode(request, Begin)
    return body if isinstance(body, HttpReply) else outcome(*await updates.begin(engine, body))


async def end(engine: Engine, request: HttpRequest) -> HttpReply:
    """/end_weight_update."""
    body = decode(request, Empty)
    return body if isinstance(body, HttpReply) else outcome(*await updates.end(engine))


async def update_from_disk(engine: Engine, request: HttpRequest) -> HttpReply:
    """/update_weights_from_disk."""
    body = decode(request, UpdateFromDisk)
    if isinstance(body, HttpReply):
        return body
    return outcome(*await updates.from_disk(engine, body), num_paused_requests=0)


async def update_from_distributed(engine: Engine, request: HttpRequest) -> HttpReply:
    """/update_weights_from_distributed: no group can ever be joined here, so every group is unknown."""
    body = decode(request, UpdateFromDistributed)
    if isinstance(body, HttpReply):
        return body
    if body.abort_all_requests:
        engine.scheduler.abort_all()

    def act() -> updates.Outcome:
        if engine.profile.sessions_required and engine.truth.session is None:
            return updates.Outcome(False, updates.NO_SESSION.format("update_weights_from_distributed"))
        reason = f"Group {body.group_name} not in []. Please call `init_weights_update_group` first."
        if engine.profile.unknown_group_kills:
            raise Fatal(f"AssertionError: {reason}")
        return updates.Outcome(False, f"Failed to receive weights: {reason}")

    span = engine.config.timings.push_s
    done = await engine.exclusively(lambda: engine.scheduler.control("distributed", span, act))
    return outcome(*done)


async def update_from_ipc(engine: Engine, request: HttpRequest) -> HttpReply:  # noqa: ARG001
    """/update_weights_from_ipc: the checkpoint engine is not installed here."""
    body = decode(request, UpdateFromIpc)
    if isinstance(body, HttpReply):
        return body
    return outcome(False, "IPC weight update failed: ImportError: No module named 'checkpoint_engine'")


async def init_group(engine: Engine, request: HttpRequest) -> HttpReply:
    """/init_weights_update_group: nobody answers the rendezvous."""
    body = decode(request, InitGroup)
    if isinstance(body, HttpReply):
        return body

    def act() -> updates.Outcome:
        if not body.group_name:
            raise Fatal("AssertionError: Group name cannot be empty")
        return updates.Outcome(False, "Failed to initialize custom process group: the simulator joins none.")

    return outcome(*await engine.scheduler.control("init_group", engine.config.timings.control_s, act))


async def destroy_group(engine: Engine, request: HttpRequest) -> HttpReply:  # noqa: ARG001
    """/destroy_weights_update_group."""
    body = decode(request, DestroyGroup)
    if isinstance(body, HttpReply):
        return body
    return outcome(False, "The group to be destroyed does not exist.")


async def check(engine: Engine, request: HttpRequest) -> HttpReply:
    """/weights_checker: every failure is a 400, but a touch of released weights kills right after it."""
    body: Check | CheckExplicit | HttpReply
    if not engine.profile.checker_takes_get:
        body = decode(request, CheckExplicit)
    elif request.body:
        body = decode(request, Check)
    else:
        body = Check()
    if isinstance(body, HttpReply):
        return body
    action = body.action
    acts: dict[str, Callable[[], HttpReply]] = {
        "snapshot": lambda: _snapshot(engine),
        "reset_tensors": lambda: _reset(engine),
        "compare": lambda: _compare(engine),
    }
    if engine.profile.has_checksum:
        acts["checksum"] = lambda: _checksum(engine)
    if action not in acts:
        return outcome(False, f"Unsupported action='{action}'")

    def act() -> HttpReply:
        try:
            engine.truth.touch_weights("weights checker")
        except Fatal as fatal:  # answered, and then the poisoned context ends the process
            engine.scheduler.fail(fatal)
            return outcome(False, fatal.cause)
        return acts[action]()

    return await engine.scheduler.change("check", engine.config.timings.control_s, act)


def _checksum(engine: Engine) -> HttpReply:
    if engine.config.device == "cpu" and engine.profile.checksum_needs_cuda:
        return outcome(False, _NO_CUDA)
    ranks = []
    for rank in range(engine.config.tp_size):
        sums = engine.truth.weights.checksums(rank)
        place: dict[str, object] = {"tp_rank": rank, "tp_size": engine.config.tp_size}
        info: object = [{"role": "target", **place}] if engine.profile.parallelism_is_list else place
        total = tensor_digest(repr(sorted(sums.items())).encode())
        ranks.append({"checksums": sums, "per_gpu_checksum": total, "parallelism_info": info})
    more: dict[str, object] = {"ranks": ranks}
    if engine.profile.checker_takes_get:
        joined = "+".join(str(rank["per_gpu_checksum"]) for rank in ranks)
        more["per_engine_checksum"] = tensor_digest(joined.encode())
    return outcome(True, "Success.", **more)


def _snapshot(engine: Engine) -> HttpReply:
    engine.snapshot = engine.truth.weights.checksums(0)
    return outcome(True, "Success.")


def _reset(engine: Engine) -> HttpReply:
    for name in engine.truth.weights.names():
        engine.truth.weights.scramble(name)
    return outcome(True, "Success.")


def _compare(engine: Engine) -> HttpReply:
    if engine.config.device == "cpu":
        return outcome(False, _NO_CUDA)
    if engine.snapshot is None:
        return outcome(False, "AssertionError: no snapshot")
    now = engine.truth.weights.checksums(0)
    different = [name for name, value in now.items() if engine.snapshot[name] != value]
    engine.snapshot = None
    return outcome(not different, f"check tensor equality failed: {different}" if different else "Success.")


async def get_weights(engine: Engine, request: HttpRequest) -> HttpReply:
    """/get_weights_by_name: the first rows of a tensor. What it has no name for it does not touch."""
    body = decode(request, GetWeights)
    if isinstance(body, HttpReply):
        return body

    def act() -> HttpReply:
        if not engine.config.reads_back or body.name not in engine.config.parameters:
            return error_reply("Get parameter by name failed")
        try:
            engine.truth.touch_weights("get_weights_by_name")
        except Fatal as fatal:
            engine.scheduler.fail(fatal)
            return error_reply("Get parameter by name failed")
        target = engine.config.parameters[body.name]
        stored = engine.truth.weights.tensor(body.name)
        return json_reply(_rows(stored or target._replace(head=b""), body.truncate_size))

    return await engine.scheduler.control("get_weights", engine.config.timings.control_s, act)


def _rows(spec: TensorSpec, limit: int) -> list[object]:
    """The rows whose bytes are known, zeros where none are, as nested lists."""
    width = prod(spec.shape[1:])
    rows = min(limit, spec.shape[0] if spec.shape else 1)
    known = unpacked(spec.dtype, spec.head[: rows * width * DTYPE_BYTES[spec.dtype]])
    cells = known or [0.0] * (rows * width)
    whole = len(cells) // width if width else 0
    if len(spec.shape) < 2:
        return list(cells)
    return [_nest(cells[at * width : (at + 1) * width], spec.shape[1:]) for at in range(whole)]


def _nest(cells: list[float], shape: tuple[int, ...]) -> list[object]:
    if len(shape) < 2:
        return list(cells)
    width = prod(shape[1:])
    return [_nest(cells[at * width : (at + 1) * width], shape[1:]) for at in range(shape[0])]
