"""The conformance checks on a real SGLang server on CPU, with and without the memory saver's stand-in.

`python -m tests.real.conformance` plays all of them, the lethal ones too.
"""

import asyncio
from pathlib import Path

import pytest

from refitfsm.sim.conformance.catalogue import HARMLESS, LETHAL
from refitfsm.sim.conformance.makers import checkpoints, connected
from refitfsm.sim.conformance.registry import Area, Check, Need
from refitfsm.sim.conformance.runner import Outcome, Verdict, mend, play
from tests.real.server import RealServer, ServeReal

QUICK = [check for check in HARMLESS if not check.slow]
WITHOUT_SAVER = [check for check in QUICK if check.needs is Need.NO_SAVER or check.area is Area.DRIVER]
COMMON_DEATHS = frozenset(
    {
        "a_resume_of_what_is_resident_kills",
        "a_release_while_a_request_runs_kills",
        "a_push_of_a_wrong_shape_kills",
        "a_short_list_of_payloads_kills",
        "a_payload_off_the_allow_list_kills",
        "a_second_release_kills_with_the_memory_saver",
    }
)
"""Each takes a server of its own, and its start: these are what controllers written by hand run into."""


def played(check: Check, url: str, folders: tuple[Path, Path]) -> Outcome:
    """Play one check on the server at a URL, and leave it serving if it can be."""

    async def life() -> Outcome:
        with checkpoints(folders) as sources:
            async with connected(url, sources) as subject:
                outcome = await play(check, subject)
                if outcome.verdict is Verdict.FAIL and not check.lethal:
                    await mend(subject)
                return outcome

    return asyncio.run(life())


def hold(outcome: Outcome) -> None:
    if outcome.verdict is Verdict.SKIP:
        pytest.skip(outcome.reason)
    assert outcome.verdict is Verdict.PASS, outcome.reason


@pytest.mark.parametrize("check", WITHOUT_SAVER, ids=[check.name for check in WITHOUT_SAVER])
def test_a_real_server_conforms(
    check: Check, real_server: RealServer, checkpoint_a: Path, checkpoint_b: Path
) -> None:
    """What the driver relies on, and what is otherwise without it, holds without the memory saver."""
    hold(played(check, real_server.url, (checkpoint_a, checkpoint_b)))


@pytest.mark.parametrize("check", QUICK, ids=[check.name for check in QUICK])
def test_a_real_server_with_the_saver_conforms(
    check: Check, real_server_saver: RealServer, checkpoint_a: Path, checkpoint_b: Path
) -> None:
    """Every harmless check that is quick holds with the memory saver's stand-in."""
    hold(played(check, real_server_saver.url, (checkpoint_a, checkpoint_b)))


@pytest.mark.parametrize("name", sorted(COMMON_DEATHS))
def test_a_real_server_dies_as_the_checks_say(
    name: str, serve: ServeReal, checkpoint_a: Path, checkpoint_b: Path
) -> None:
    """The deaths that are common in practice kill a real server, and the driver sees that they did."""
    (check,) = [check for check in LETHAL if check.name == name]
    server = serve(memory_saver=True)
    hold(played(check, server.url, (checkpoint_a, checkpoint_b)))
    assert server.wait_exit(30.0) != 0
