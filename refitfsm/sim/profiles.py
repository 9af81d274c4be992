"""What differs between SGLang releases, as one record per version.

The simulator has no `if version` anywhere else: a behaviour that depends on the release is a field
here. Releases from 0.5.10 to 0.5.23 are known; older ones leave zombie processes behind where these
die, and are not simulated.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from refitfsm.sim.config import SimConfig, Span, Timings

__all__ = ["NEWEST", "OLDEST", "Band", "SimConfig", "SimProfile", "Span", "Timings", "profile_for"]

OLDEST: Final = 10
NEWEST: Final = 23
"""The last number of the oldest and newest release known: 0.5.10 and 0.5.23."""

_VERSION: Final = re.compile(r"0\.5\.(\d{1,3})(?:\.post\d+)?")


class Band(StrEnum):
    """A run of releases that behave alike in what can kill or corrupt a server."""

    B4 = "B4"
    """0.5.10 to 0.5.20: no sessions; release and flush count the waiting queue."""
    B5 = "B5"
    """0.5.21: sessions are mandatory; while paused the waiting queue is not counted."""
    B6 = "B6"
    """0.5.22 and 0.5.23: a flush refused after an update is an answer, no longer a death."""


@dataclass(frozen=True, slots=True)
class SimProfile:
    """The facts of one release."""

    version: str
    band: Band
    sessions_required: bool
    """Weights may be pushed only between /begin_weight_update and /end_weight_update."""
    waiting_ignored_while_paused: bool
    """While the scheduler is paused its waiting queue does not count against idleness."""
    refused_flush_kills: bool
    """An update whose flush is refused kills the server; else it answers 400, weights changed."""
    bad_base64_kills: bool
    """A payload that is not base64 reaches the scheduler and kills it; else it is a 400."""
    unknown_group_kills: bool
    """A distributed update for an unknown group kills; else it is a 400."""
    exact_allow_list: bool
    """Payload pickles are held to exact global names; else to module prefixes."""
    update_holds_gate: bool
    """While paused, an update keeps /continue_generation waiting until it is done."""
    has_ready: bool
    """/ready exists."""
    has_get_load: bool
    """/get_load exists."""
    weight_version_route_retired: bool
    """/get_weight_version is registered and always answers 404; else it is not registered."""
    has_checksum: bool
    """/weights_checker knows the action checksum."""
    checker_takes_get: bool
    """/weights_checker takes GET and no body, and answers `per_engine_checksum`."""
    checksum_needs_cuda: bool
    """The action checksum fails on a CPU."""
    parallelism_is_list: bool
    """`parallelism_info` of a checksum is a list; else an object."""
    version_spans: bool
    """`meta_info` has `weight_versions`, and the version is the scheduler's, span by span."""
    generate_schema_gate: bool
    """A /generate body that breaks the schema is a 400 whose `error` is a string."""
    identity_in_model_info: bool
    """/model_info has `served_model_name`, `load_format` and more."""
    has_frontend_field: bool
    """/server_info has `frontend`."""
    loads_have_accelerator: bool
    """/v1/loads names the accelerator; the oldest ones have `dp_rank_count` and `aggregate` instead."""


@lru_cache(maxsize=64)
def profile_for(version: str) -> SimProfile:
    """The profile of an SGLang release, such as "0.5.16" or "0.5.12.post1".

    Raises:
        ValueError: the release is not one of the simulated ones.
    """
    match = _VERSION.fullmatch(version)
    number = int(match.group(1)) if match else -1
    if not OLDEST <= number <= NEWEST:
        raise ValueError(
            f"SGLang {version!r} is not simulated: give a release from 0.5.{OLDEST} to 0.5.{NEWEST}, "
            'such as "0.5.16" or "0.5.12.post1"'
        )
    return _profile(version, number)


def _profile(version: str, number: int) -> SimProfile:
    return SimProfile(
        version=version,
        band=Band.B4 if number <= 20 else Band.B5 if number == 21 else Band.B6,
        sessions_required=number >= 21,
        waiting_ignored_while_paused=number >= 21,
        refused_flush_kills=number <= 21,
        bad_base64_kills=number <= 14,
        unknown_group_kills=number <= 20,
        exact_allow_list=number >= 21,
        update_holds_gate=number >= 11,
        has_ready=number >= 20,
        has_get_load=number <= 20,
        weight_version_route_retired=number <= 20,
        has_checksum=number >= 12,
        checker_takes_get=number >= 13,
        checksum_needs_cuda=number <= 16,
        parallelism_is_list=number >= 21,
        version_spans=number >= 19,
        generate_schema_gate=number >= 22,
        identity_in_model_info=number >= 18,
        has_frontend_field=number >= 21,
        loads_have_accelerator=number >= 18,
    )
