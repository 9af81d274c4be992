"""`refitfsm simulate` plays lives with faults, and fails when a law is broken."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from refitfsm.cli.main import main
from refitfsm.model.states import ServerState
from refitfsm.model.table import TABLE
from refitfsm.model.values import EventName
from refitfsm.sim.judged import LAWS
from tests.unit.cli.conftest import Cli

SEEDS = 100


def test_it_says_how_each_life_went_and_what_they_add_up_to(cli: Cli) -> None:
    """A line for each seed; then refits, faults, and each law with how often it was at risk; status 0."""
    ran = cli("simulate", "--seeds", "3", "--servers", "2", "--cycles", "2")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["seed 0", "seed 1", "seed 2"]
    assert lines[3].startswith("lives: 3; refits ")
    assert {law for law in LAWS if any(line.startswith(f"{law}: ") for line in lines[4:])} == set(LAWS)
    assert lines[-1].startswith("no law is broken; journals ")


def test_the_object_adds_up(cli: Cli) -> None:
    """What the total says is the sum of what the runs say."""
    said = cli("simulate", "--seeds", "4", "--servers", "2", "--cycles", "2", "--json").object
    runs, total = said["runs"], said["total"]
    assert isinstance(runs, list)
    assert isinstance(total, dict)
    assert said["good"] is True
    assert total["records"] == sum(run["records"] for run in runs) > 0
    assert total["restarts"] == sum(run["restarts"] for run in runs)
    healed = [run["healed"] for run in runs]
    assert total["healed"] == {how: healed.count(how) for how in ("as it was", "after a restart")}
    for run in runs:
        assert (run["healed"] == "as it was") == (run["restarts"] == 0)


def test_a_law_that_nothing_could_break_counts_as_not_tested(cli: Cli) -> None:
    """A life in which no refit interrupted an answer says so, and does not count the law as kept."""
    few = ["--servers", "1", "--cycles", "1"]
    runs = cli("simulate", *few, "--seeds", "12", "--json").object["runs"]
    assert isinstance(runs, list)
    law = "no_answer_from_mixed_versions"
    calm = next(run["seed"] for run in runs if run["at_risk"][law] == 0)
    lines = cli("simulate", *few, "--seed", str(calm), "--seeds", "1").out.splitlines()
    assert f"{law}: never at risk: not tested" in lines
    assert "a_journal_holds: never at risk: not tested" not in lines


def test_servers_that_lie_are_caught_and_the_life_can_be_played_again(cli: Cli) -> None:
    """Status 1, with the law and a command that plays the same life: one digest, the same law."""
    ran = cli(
        "simulate", "--seeds", "20", "--servers", "2", "--cycles", "2", "--fault", "lie", "--every", "4"
    )
    assert ran.code == 1
    lines = ran.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("    breaks "))
    again = next(line for line in lines if line.startswith("    again: "))
    program, *arguments = shlex.split(again.removeprefix("    again: "))
    assert program == "refitfsm"
    repeated = cli(*arguments)
    assert repeated.code == 1
    assert repeated.out.splitlines()[:2] == lines[at - 1 : at + 1]


def test_a_planner_that_is_wrong_is_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table that forgets that a lost answer leaves a server in doubt: status 1, and what it believed."""
    for state in ServerState:
        cell = TABLE[state, EventName.LOST]
        kept = tuple(row for row in cell if "command_moves_memory" not in row.guards)
        monkeypatch.setitem(TABLE, (state, EventName.LOST), kept)
    arguments = ["--seeds", "20", "--cycles", "2", "--fault", "lose-answer", "--every", "4", "--json"]
    assert main(["simulate", *arguments]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["good"] is False
    laws = {broken.partition(":")[0] for run in said["runs"] for broken in run["broken"]}
    assert laws & {"no_call_kills", "belief_is_true"}


def test_the_shortest_life_is_kept_and_played_again(cli: Cli, tmp_path: Path) -> None:
    """A planted mistake breaks a law; what remains is printed, kept as a file, and breaks it again."""
    given = ["--servers", "2", "--cycles", "2", "--seeds", "3", "--fault", "lose-answer", "--every", "6"]
    said = cli("simulate", *given, "--planted", "releases what is released", "--save", tmp_path, "--json")
    assert said.code == 1
    shortest = said.object["shortest"]
    assert isinstance(shortest, dict)
    for law, life in shortest.items():
        again = cli("simulate", "--replay", life["file"])
        assert again.code == 1
        assert [line.strip() for line in life["script"]] == [
            line.strip() for line in again.out.splitlines()[1 : 1 + len(life["script"])]
        ]
        assert again.out.splitlines()[-1] == f"{law} is broken"
    assert shortest
    assert "is no planner" in cli("simulate", "--planted", "nothing of the kind").error
    assert "cannot be read" in cli("simulate", "--replay", tmp_path / "none.toml").error


def test_what_does_not_fit_is_said_before_anything_is_played(cli: Cli, tmp_path: Path) -> None:
    """A release that is not simulated, and a proof that the tiny model does not allow: one line, status 2."""
    assert "0.4.1" in cli("simulate", "--sglang-version", "0.4.1").error
    file = tmp_path / "proves.toml"
    file.write_text('description = "proves"\nverify = "content"\n')
    ran = cli("simulate", "--policy", file, "--seeds", "1")
    assert (ran.code, "verify = content" in ran.error) == (2, True)


def test_a_hundred_seeds_are_the_same_in_every_process() -> None:
    """Nothing but the seed decides: two processes that hash otherwise write the same journals to the byte."""
    arguments = ["simulate", "--seeds", str(SEEDS), "--servers", "2", "--cycles", "1", "--json"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "refitfsm", *arguments],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    one, other = (json.loads(process.communicate()[0]) for process in processes)
    digests = [run["journal_digest"] for run in one["runs"]]
    assert len(set(digests)) == SEEDS
    assert digests == [run["journal_digest"] for run in other["runs"]]
