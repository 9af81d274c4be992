"""What a server's own words say about it: version, capabilities, and launch options that do not fit.

Facts by version were read in SGLang's released sources and asked of running servers.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from refitfsm.drivers import labels
from refitfsm.model.values import Capabilities
from refitfsm.server import LOADER

OLDEST, NEWEST = (0, 5, 6), (0, 5, 23)
"""The versions whose protocol is known: 0.5.6 has the pause modes, 0.5.23 is the newest one read."""
SESSIONS_FROM = (0, 5, 21)
READY_FROM = (0, 5, 20)
CHECKSUMS_FROM = (0, 5, 12)

Info = Mapping[str, object]


class Misfit(Exception):
    """The server cannot be managed; the message says why and what to do."""


class Option(NamedTuple):
    """A launch option that cannot be managed safely."""

    field: str
    wrong: Callable[[Info], bool]
    why: str


def _more_than_one(field: str) -> Callable[[Info], bool]:
    return lambda info: isinstance(info.get(field), int) and info[field] != 1


OPTIONS: tuple[Option, ...] = (
    Option(
        "dp_size",
        lambda info: _more_than_one("dp_size")(info) and not info.get("enable_dp_attention"),
        "data-parallel replicas refuse tensor updates; run one server for each replica",
    ),
    Option(
        "pp_size", _more_than_one("pp_size"), "pipeline stages do not honour a pause; use tensor parallelism"
    ),
    Option(
        "tokenizer_worker_num",
        _more_than_one("tokenizer_worker_num"),
        "each HTTP worker has a gate of its own; start with --tokenizer-worker-num 1",
    ),
    Option(
        "speculative_algorithm",
        lambda info: bool(info.get("speculative_algorithm")),
        "a draft model's weights are not managed; start without speculative decoding",
    ),
    Option(
        "disaggregation_mode",
        lambda info: info.get("disaggregation_mode") not in (None, "null"),
        "prefill and decode servers are not managed; start with --disaggregation-mode null",
    ),
    Option(
        "weight_cache_mode",
        lambda info: info.get("weight_cache_mode") not in (None, "off"),
        "a server with a weight cache dies of a release or an update; start with --weight-cache-mode off",
    ),
    Option(
        "hicache_storage_backend",
        lambda info: bool(info.get("hicache_storage_backend")),
        "the storage tier of the cache survives a flush and would answer from old weights; start without it",
    ),
)


def parse_version(text: str) -> tuple[int, int, int]:
    """`0.5.12.post1` as (0, 5, 12).

    Raises:
        Misfit: it is no version.
    """
    parts = text.split(".")[:3]
    if len(parts) < 3 or not all(part.isdigit() for part in parts):
        raise Misfit(f"its version {text!r} is not one that is known")
    return int(parts[0]), int(parts[1]), int(parts[2])


def dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def capabilities(info: Info, model: Info, *, allow_unknown_version: bool = False) -> Capabilities:
    """What a server can do, from /server_info and /model_info.

    Raises:
        Misfit: it cannot be managed.
    """
    text = str(info.get("version", ""))
    version = parse_version(text)
    if not OLDEST <= version <= NEWEST and not allow_unknown_version:
        raise Misfit(
            f"SGLang {text} is not known: the protocol was read for {dotted(OLDEST)} to {dotted(NEWEST)};"
            " use one of these, or pass allow_unknown_version=True to Fleet.connect"
        )
    for option in OPTIONS:
        if option.wrong(info):
            raise Misfit(f"{option.field} is {info.get(option.field)!r}: {option.why}")
    sessions = version >= SESSIONS_FROM
    if info.get("quantization") and not sessions:
        raise Misfit(
            f"quantization is {info['quantization']!r}: before {dotted(SESSIONS_FROM)} nothing rebuilds the"
            " packed weights after an update; use a newer SGLang or no quantization"
        )
    tp_size = info.get("tp_size", 1)
    pushed, started = labels.origin(str(model.get("weight_version", "")))
    return Capabilities(
        sglang_version=text,
        sessions=sessions,
        memory_saver=bool(info.get("enable_memory_saver")),
        weights_backup=bool(info.get("enable_weights_cpu_backup")) and bool(info.get("enable_memory_saver")),
        checksums=version >= CHECKSUMS_FROM,
        tp_size=tp_size if isinstance(tp_size, int) else 1,
        loader=_has_loader(info.get("custom_weight_loader")),
        on_cpu=info.get("device") == "cpu",
        weights_bytes=_used_bytes(info, "weight"),
        kv_cache_bytes=_used_bytes(info, "kvcache"),
        model_path=str(model.get("model_path", "")),
        weight_label=pushed,
        start_label=started,
        incarnation=_incarnation(info),
    )


def _used_bytes(info: Info, what: str) -> int:
    """The most that a rank uses for something; SGLang says it in GiB, rounded."""
    states = info.get("internal_states")
    found = [0.0]
    for state in states if isinstance(states, list) else ():
        usage = state.get("memory_usage") if isinstance(state, dict) else None
        size = usage.get(what) if isinstance(usage, dict) else None
        if isinstance(size, int | float):
            found.append(size)
    return int(max(found) * 2**30)


def _has_loader(loaders: object) -> bool:
    return isinstance(loaders, list) and LOADER in loaders


def _incarnation(info: Info) -> str:
    """A digest of what differs between two starts: the random seed, and measured start-up times."""
    shown = [info.get("version"), info.get("random_seed"), info.get("startup_time")]
    return hashlib.sha256(json.dumps(shown, sort_keys=True, default=str).encode()).hexdigest()[:16]
