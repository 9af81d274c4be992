"""`refitfsm audit verify`: a log that holds, and logs that do not."""

from pathlib import Path

import pytest
from conftest import Cli, Simulated


@pytest.fixture
def audit(cli: Cli, sim: Simulated, checkpoints: tuple[Path, Path], tmp_path: Path) -> Path:
    """The log of one refit."""
    path = tmp_path / "run.jsonl"
    assert cli("run", "--server", sim.start(), "--weights", checkpoints[1], "--audit", path).code == 0
    return path


def test_a_true_log_holds(cli: Cli, audit: Path) -> None:
    """One line with the counts, and the same in the object."""
    ran = cli("audit", "verify", audit)
    assert ran.code == 0
    assert ran.out.count("\n") == 1
    assert "holds: " in ran.out
    assert "(2 commits, 0 aborted); serves version 1" in ran.out
    told = cli("audit", "verify", audit, "--json").object
    assert (told["holds"], told["committed"], told["serving_version"]) == (True, 2, 1)
    assert told["records"] == len(audit.read_text().splitlines())


def _edited(lines: list[str]) -> list[str]:
    return [line.replace('"serving_after":1', '"serving_after":2') for line in lines]


def _dropped(lines: list[str]) -> list[str]:
    return lines[:5] + lines[6:]


def _swapped(lines: list[str]) -> list[str]:
    return [*lines[:5], lines[6], lines[5], *lines[7:]]


def _cut(lines: list[str]) -> list[str]:
    return [*lines[:-1], lines[-1][:-20]]


@pytest.mark.parametrize("change", [_edited, _dropped, _swapped, _cut])
def test_a_changed_log_does_not_hold(cli: Cli, audit: Path, change: object) -> None:
    """An edited, shortened, reordered or torn log is exit 1 and one line that names the line."""
    assert callable(change)
    lines = audit.read_text().splitlines()
    audit.write_text("\n".join(change(lines)) + "\n")
    ran = cli("audit", "verify", audit)
    assert (ran.code, ran.out) == (1, "")
    assert "line " in ran.error
    told = cli("audit", "verify", audit, "--json")
    assert (told.code, told.object["holds"]) == (1, False)


def test_a_log_that_lost_its_end_can_be_told(cli: Cli, audit: Path) -> None:
    """Lines missing at the end are told by the end that is not there, and by the last hash if it was kept."""
    kept = str(cli("audit", "verify", audit, "--json").object["hash"])
    assert cli("audit", "verify", audit, "--closed", "--hash", kept).code == 0
    audit.write_text("".join(audit.read_text().splitlines(keepends=True)[:-1]))
    assert "was not closed" in cli("audit", "verify", audit).out
    without_end = cli("audit", "verify", audit, "--closed")
    assert (without_end.code, "has no end" in without_end.error) == (1, True)
    another = cli("audit", "verify", audit, "--hash", kept)
    assert (another.code, "is another one" in another.error) == (1, True)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", b"{}\n"])
def test_what_is_no_log_is_one_line(cli: Cli, tmp_path: Path, content: bytes | None) -> None:
    """A missing, empty or foreign file is exit 1 with the reason."""
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    ran = cli("audit", "verify", path)
    assert (ran.code, ran.out) == (1, "")
    assert str(path) in ran.error


def test_a_run_is_decided_again(cli: Cli, audit: Path) -> None:
    """The planner that wrote a log decides the same; another policy does not, and says where."""
    same = cli("audit", "replay", audit)
    assert (same.code, "decided the same under colocated" in same.out) == (0, True), same
    assert cli("audit", "replay", audit, "--json").object["same"] is True
    other = cli("audit", "replay", audit, "--policy", "always_on")
    assert (other.code, other.out) == (1, "")
    assert "is decided otherwise: recorded: " in other.error
    told = cli("audit", "replay", audit, "--policy", "always_on", "--json")
    assert (told.code, told.object["same"]) == (1, False)
    assert told.object["difference"]
    audit.write_text("")
    assert "is empty" in cli("audit", "replay", audit).error


def test_corruptions_of_a_log_are_noticed(cli: Cli, audit: Path, tmp_path: Path) -> None:
    """A table of what was done and what became of it; a log that does not hold is refused."""
    ran = cli("audit", "corrupt", audit, "--count", "65")
    assert ran.code == 0, ran
    assert ran.out.splitlines()[-1].split()[:3] == ["all", "65", "65"]
    told = cli("audit", "corrupt", audit, "--count", "65", "--json").object
    assert told["good"] is True
    (tmp_path / "short").write_text("".join(audit.read_text().splitlines(keepends=True)[:3]))
    assert "too few" in cli("audit", "corrupt", tmp_path / "short").error
    (tmp_path / "bad").write_text("x")
    bad = cli("audit", "corrupt", tmp_path / "bad")
    assert (bad.code, "give one that holds" in bad.error) == (2, True)


def test_a_run_becomes_a_scenario(cli: Cli, audit: Path, tmp_path: Path) -> None:
    """The scenario of a log is written, ends as the run did, and can be played."""
    to = tmp_path / "incident.toml"
    made = cli("audit", "replay", audit, "--as-scenario", to)
    assert (made.code, made.out) == (0, f"{to}: 3 of 3 calls end as in the run\n"), made
    assert cli("simulate", "--scenario", to).code == 0
    assert cli("audit", "replay", audit, "--as-scenario", to, "--json").object["same"] is True
    audit.write_text("x")
    broken = cli("audit", "replay", audit, "--as-scenario", to)
    assert (broken.code, "line 1" in broken.error) == (1, True)
    assert cli("audit", "replay", tmp_path / "none", "--as-scenario", to).code == 2
    assert "--policy" in cli("audit", "replay", audit, "--as-scenario", to, "--policy", "kv_only").error
