"""The shipped checks: they hold on the simulator, and a server that is wrong breaks the one that says so."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from refitfsm.drivers.transport import Reply
from refitfsm.sim.config import SimConfig
from refitfsm.sim.conformance.__main__ import main
from refitfsm.sim.conformance.catalogue import EVERY
from refitfsm.sim.conformance.makers import simulated
from refitfsm.sim.conformance.registry import Check
from refitfsm.sim.conformance.runner import Maker, Outcome, Verdict, play_all, play_shared
from refitfsm.sim.conformance.subject import Subject
from refitfsm.sim.loop import run
from refitfsm.sim.server import SimServer
from refitfsm.sim.tiny import TinyWeights
from refitfsm.sim.transport import SimTransport
from tests.conformance.lying import lying

VERSIONS = ("0.5.12", "0.5.16", "0.5.23")
BY_NAME = {check.name: check for check in EVERY}
OK, NULL = Reply(200, b'{"success": true, "message": "Success"}'), Reply(200, b"null")
PAUSED = Reply(200, b'{"message": "Generation paused successfully.", "status": "ok"}')
FLUSHED = Reply(200, b"Cache flushed.\n")
MISFIT = Reply(422, b'{"detail": []}')

LIES: Mapping[str, Mapping[str, Reply]] = {
    "a_resume_of_what_is_resident_kills": {"/resume_memory_occupation": NULL},
    "a_push_of_a_wrong_shape_kills": {"/update_weights_from_tensor": OK},
    "a_token_outside_the_vocabulary_kills": {"/generate": Reply(400, b'{"error": {"message": "no"}}')},
    "a_paused_server_holds_requests": {"/pause_generation": PAUSED},
    "a_push_in_chunks_changes_the_answers_and_back": {"/update_weights_from_tensor": OK},
    "a_flush_empties_the_prefix_cache": {"/flush_cache": FLUSHED},
    "a_flush_is_refused_while_a_request_runs": {"/flush_cache": FLUSHED},
    "sessions_open_and_close_once": {"/begin_weight_update": OK},
    "ready_is_an_answer_about_pausing": {"/ready": Reply(200, b"")},
    "an_unknown_pause_mode_is_refused": {"/pause_generation": MISFIT},
    "released_weights_are_gone": {"/release_memory_occupation": NULL, "/resume_memory_occupation": NULL},
}
"""For each check a server that breaks it: what it answers, by path, instead of doing anything."""


def played(make: Maker, *checks: Check) -> list[Outcome]:
    async def life() -> list[Outcome]:
        return [outcome async for outcome in play_all(make, checks)]

    return run(life())


@pytest.mark.parametrize("saver", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_simulator_does_what_sglang_is_taken_to_do(version: str, saver: bool) -> None:
    """No check fails on the simulator, and most apply to each release."""
    config = SimConfig(sglang_version=version, memory_saver=saver, skip_warmup=True)
    outcomes = played(simulated(config), *EVERY)
    assert [(each.check.name, each.reason) for each in outcomes if each.verdict is Verdict.FAIL] == []
    assert sorted(each.check.name for each in outcomes) == sorted(BY_NAME)
    assert sum(each.verdict is Verdict.PASS for each in outcomes) >= 90


@pytest.mark.parametrize("name", LIES)
def test_a_check_finds_the_server_that_breaks_it(name: str) -> None:
    """A check fails on a server that only claims to do what it is about, and says why."""
    assert [each.verdict for each in played(simulated(SimConfig(skip_warmup=True)), BY_NAME[name])] == [
        "pass"
    ]
    (outcome,) = played(lying(LIES[name]), BY_NAME[name])
    assert outcome.verdict is Verdict.FAIL
    assert outcome.reason


def test_a_failure_does_not_spoil_what_comes_after_it() -> None:
    """After a check that fails the next harmless one gets a fresh server."""
    names = ("a_paused_server_holds_requests", "an_answer_has_tokens_and_facts")
    outcomes = played(lying(LIES[names[0]]), *(BY_NAME[name] for name in names))
    assert [each.verdict for each in outcomes] == ["fail", "pass"]


def test_a_server_that_cannot_be_started_again_is_not_killed() -> None:
    """On one shared server the lethal checks are skipped, and the server serves at the end."""

    async def life() -> None:
        server = SimServer(SimConfig(skip_warmup=True))
        subject = Subject(SimTransport(server), TinyWeights)
        outcomes = [outcome async for outcome in play_shared(subject, EVERY)]
        assert {each.verdict for each in outcomes if each.check.lethal} == {Verdict.SKIP}
        assert server.listening

    run(life())


def test_names_and_laws_are_one_line_each() -> None:
    """Every check has a name of its own and says its law."""
    assert len(BY_NAME) == len(EVERY) >= 60
    assert [check.name for check in EVERY if not check.law.endswith(".") or len(check.law) > 110] == []


def test_the_command_prints_a_table_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a check, a count at the end, the same as JSON; a failure is exit status 1."""
    out = tmp_path / "out.json"
    assert main(["--sim", "0.5.16", "--only", "ready", "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "1 pass, 0 fail, 1 skip"
    verdicts = {row["check"]: row["verdict"] for row in json.loads(out.read_text())}
    assert verdicts == {"ready_is_an_answer_about_pausing": "skip", "ready_is_not_there_yet": "pass"}
