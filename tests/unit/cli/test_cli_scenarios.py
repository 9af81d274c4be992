"""`refitfsm simulate --scenario` says how scenarios went, and fails when one does."""

from pathlib import Path

from tests.unit.cli.conftest import Cli

HOLDS = """
name = "two servers"
ids = ["X1"]
shows = "Nothing happens."
[fleet]
steps = [{ do = "connect" }, { do = "generate" }]
never = ["server_dies"]
sometimes = ["request_is_answered: version 0"]
"""
FAILS = HOLDS.replace("version 0", "version 1")
OPEN = 'open = "there is no version 1"\n' + FAILS


def written(folder: Path, **texts: str) -> str:
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    return str(folder)


def test_it_says_how_each_scenario_went(cli: Cli, tmp_path: Path) -> None:
    """A line for each, why one is open, and the sums; status 0."""
    ran = cli("simulate", "--scenario", written(tmp_path, calm=HOLDS, later=OPEN))
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "calm: holds (X1: two servers)"
    assert lines[1] == "later: is open (X1: two servers)"
    assert lines[2].strip() == "there is no version 1"
    assert lines[3].strip() == "now: was never seen: request_is_answered: version 1"
    assert lines[-1].startswith("scenarios: 1 hold, 1 open, 0 fail; 0 faults befell calls; ")


def test_a_scenario_that_fails_is_status_1(cli: Cli, tmp_path: Path) -> None:
    """The one that fails says what was not as it had to be, as JSON too."""
    folder = written(tmp_path, calm=HOLDS, wrong=FAILS)
    ran = cli("simulate", "--scenario", folder)
    assert ran.code == 1
    assert "wrong: fails" in ran.out
    said = cli("simulate", "--scenario", folder, "--json").object
    assert said["good"] is False
    assert isinstance(said["scenarios"], list)
    assert [each["verdict"] for each in said["scenarios"]] == ["holds", "fails"]
    assert said["scenarios"][1]["wrong"] == ["was never seen: request_is_answered: version 1"]


def test_everything_that_was_seen_can_be_printed(cli: Cli, tmp_path: Path) -> None:
    """With --trace each sight is a line, in the order of the virtual clock."""
    ran = cli("simulate", "--scenario", written(tmp_path, calm=HOLDS), "--trace")
    assert "request_is_answered: s0 version 0 length" in ran.out
    times = [float(line.split()[0]) for line in ran.out.splitlines() if line.startswith("        ")]
    assert times == sorted(times)
    assert times


def test_a_file_that_is_not_there_is_one_line(cli: Cli) -> None:
    """An error of the user's is a line that says what to give; status 2."""
    ran = cli("simulate", "--scenario", "nowhere")
    assert ran.code == 2
    assert ran.err.splitlines() == [
        "refitfsm: scenario nowhere: there is none; give a TOML file, or a folder of such"
    ]
