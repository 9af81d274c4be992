"""`refitfsm check` says what it searched, and where a law breaks."""

import json
from pathlib import Path

import pytest

from refitfsm.check.planted.mistake import Mistake
from refitfsm.cli.main import main
from refitfsm.cli.seen import SOMETIMES
from refitfsm.model.states import ServerState
from refitfsm.model.table import TABLE
from refitfsm.model.values import EventName


def test_it_says_what_was_searched(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each policy and kind of server, then what was met, and each law by its risk; status 0."""
    assert main(["check", "--servers", "1", "--faults", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    searched = [line for line in lines if line.endswith("every law holds")]
    assert {line.partition(" (")[0] for line in searched} == {"always_on", "colocated", "kv_only"}
    met = lines[len(searched) :]
    assert [line.partition(":")[0] for line in met[:3]] == ["sometimes"] * 3
    assert met[2].startswith(f"sometimes: 0 of {len(SOMETIMES['faults'])} faults; never: ")
    assert [line.partition(": ")[0] for line in met[3:]] == list(SOMETIMES["risks"])


@pytest.mark.parametrize("apart", [[], ["--apart"]], ids=["in full", "apart"])
def test_every_law_is_at_risk_and_every_fault_befalls(
    apart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With one fault no law goes untested, no fault is left out, and cycles turn in every way."""
    assert main(["check", *apart, "--servers", "1", "--faults", "1", "--json"]) == 0
    never = json.loads(capsys.readouterr().out)["never"]
    assert {kind: never[kind] for kind in ("turns", "faults", "risks")} == {
        "turns": [],
        "faults": [],
        "risks": [],
    }


def test_a_policy_of_ones_own_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file is searched as a shipped policy is, and the figures can be had as JSON."""
    file = tmp_path / "mine.toml"
    file.write_text('description = "mine"\nrelease = ["kv_cache"]\non_failure = "quarantine"\n')
    assert main(["check", "--policy", str(file), "--servers", "2", "--faults", "0", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["good"] is True
    assert [run["servers_are"] for run in said["runs"]] == ["no sessions", "sessions"]
    assert all(run["complete"] and run["policy"] == "mine" for run in said["runs"])


def test_a_broken_law_is_shown_with_the_way_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shortest script, the law last; status 1."""
    key = (ServerState.SERVING, EventName.LOST)
    monkeypatch.setitem(TABLE, key, tuple(row for row in TABLE[key] if "suspect" not in row.effects))
    assert main(["check", "--policy", "colocated", "--servers", "1"]) == 1
    out = capsys.readouterr().out
    assert "a law is broken" in out
    assert "breaks no_command_kills: s0 died of a release of what is released" in out


def test_a_search_that_is_cut_short_is_no_proof(capsys: pytest.CaptureFixture[str]) -> None:
    """Where not all states were reached it says so; status 1."""
    assert main(["check", "--policy", "always_on", "--servers", "1", "--states-max", "20"]) == 1
    assert "not all states were reached" in capsys.readouterr().out


def test_a_canary_is_found_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """One planner that is wrong on purpose, drawn by a text: what it breaks, and the way there; status 0."""
    assert main(["check", "--canary", "some commit"]) == 0
    out = capsys.readouterr().out
    assert "     breaks " in out
    assert "1 of 1 planners that are wrong on purpose found" in out


def test_a_canary_that_is_not_found_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planner that makes no mistake stands for a search that does not see: status 1."""
    sound = Mistake("makes no mistake", ("F01",), "It is the planner that ships.")
    monkeypatch.setattr("refitfsm.cli.check.drawn", lambda _text: sound)
    assert main(["check", "--canary", "some commit", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["good"] is False
    assert said["planted"][0]["law"] is None
