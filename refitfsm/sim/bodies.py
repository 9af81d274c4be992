"""Request bodies of SGLang's HTTP calls: their fields, defaults, and what a misfit is told."""

from typing import Final, Literal, TypeVar

import msgspec

from refitfsm.sim.wire import HttpReply, HttpRequest, invalid_body

Selector = Literal["target", "draft", "all"]


class Body(msgspec.Struct, kw_only=True):
    """Unknown fields are ignored."""


class Memory(Body):
    tags: list[str] | None = None


class UpdateFromTensor(Body):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Selector = "all"


class UpdateFromDisk(Body):
    model_path: str
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class UpdateFromDistributed(Body):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    abort_all_requests: bool = False


class UpdateFromIpc(Body):
    zmq_handles: dict[str, str]


class InitGroup(Body):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroup(Body):
    group_name: str = "weight_update_group"


class Begin(Body):
    selector: Selector = "all"


class Empty(Body):
    pass


class Pause(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(Body):
    rid: str | None = None
    abort_all: bool = False


class Check(Body):
    action: str = "checksum"
    selector: Selector = "all"
    skip_tensor_list: list[str] | None = None


class CheckExplicit(Body):
    """Releases whose checker has no default action."""

    action: str


class GetWeights(Body):
    name: str
    truncate_size: int = 100


class NewVersion(Body):
    new_version: str
    abort_all_requests: bool = True


class SlowDown(Body):
    forward_sleep_time: float | None


class Sampling(Body):
    max_new_tokens: int | None = 128
    n: int = 1


class Generate(Body):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Sampling | list[Sampling] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False


B = TypeVar("B", bound=Body)

_DECODERS: Final[dict[type[Body], msgspec.json.Decoder[Body]]] = {}


def decode(request: HttpRequest, kind: type[B]) -> B | HttpReply:
    """The request's body, or the 400 that says what is wrong with it.

    A body is wanted even where all its fields have defaults, and it must be declared to be JSON.
    """
    if not request.body or not request.is_json:
        return invalid_body("missing", ("body",), "Field required")
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    try:
        found = decoder.decode(request.body)
    except msgspec.ValidationError as error:
        return invalid_body("missing" if "missing" in str(error) else "type", ("body",), _reason(error))
    except msgspec.DecodeError as error:
        return invalid_body("json_invalid", ("body",), f"JSON decode error: {_plain(error)}")
    assert isinstance(found, kind)  # noqa: S101 - the decoder was made for it
    return found


def _reason(error: msgspec.ValidationError) -> str:
    text = _plain(error)
    return f"Field required: {text}" if "missing" in text or "got `null`" in text else text


def _plain(error: Exception) -> str:
    return str(error).replace("'", "`")
