"""What a fleet answers to a request: values, and how they are read from SGLang's JSON."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from refitfsm.drivers.labels import version_of
from refitfsm.errors import ConfigError, RequestFailed


class Generation(NamedTuple):
    """One answer."""

    server: str
    """Who answered."""
    version: int
    """The weight version that made it."""
    output_ids: tuple[int, ...]
    """The new tokens."""
    text: str
    """Empty where the server has no tokenizer."""
    finish_reason: str
    """`stop`, `length`, or `abort` when a refit began before it was done."""
    meta: Mapping[str, object]
    """SGLang's `meta_info` as it came: log-probabilities, token counts, latency."""


class _Answer(msgspec.Struct):
    meta_info: dict[str, object]
    output_ids: list[int] = []
    text: str | None = None


def request_body(
    prompt: str | Sequence[int], sampling_params: Mapping[str, object], options: Mapping[str, object]
) -> bytes:
    """The body of /generate for one prompt, as text or as token ids.

    Raises:
        ConfigError: the prompt is empty, or neither text nor token ids, or something is not JSON.
    """
    if not prompt:
        raise ConfigError("the prompt is empty: give text or at least one token id")
    if isinstance(prompt, str):
        given: dict[str, object] = {"text": prompt}
    elif all(isinstance(token, int) for token in prompt):
        given = {"input_ids": list(prompt)}
    else:
        raise ConfigError("the prompt is neither text nor a list of token ids")
    if sampling_params.get("n", 1) != 1:
        raise ConfigError("sampling_params: n is one answer at a time here; ask n times")
    try:
        return msgspec.json.encode({**options, **given, "sampling_params": sampling_params, "stream": False})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the request cannot be written as JSON: {error}") from None


def read_answer(server: str, run_id: str, body: bytes) -> Generation:
    """An answer of /generate. Its version is -1 when the label is none of this run's.

    Raises:
        RequestFailed: the body is no answer.
    """
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except msgspec.DecodeError as error:
        raise RequestFailed(f"{server}: the answer cannot be read: {error}") from None
    meta = answer.meta_info
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    return Generation(
        server,
        version_of(str(meta.get("weight_version", "")), run_id),
        tuple(answer.output_ids),
        answer.text or "",
        str(kind or ""),
        meta,
    )
