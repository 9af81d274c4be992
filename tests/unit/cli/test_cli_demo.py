"""`refitfsm demo`: it does what it shows."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Cli

from refitfsm.audit.verify import verify_file


@pytest.mark.parametrize("policy", ["colocated", "always_on", "kv_only"])
def test_every_cycle_commits(cli: Cli, tmp_path: Path, policy: str) -> None:
    """Under each shipped policy all cycles commit, answers change with the version, and the audit holds."""
    audit = tmp_path / "demo.jsonl"
    ran = cli("demo", "--servers", "2", "--cycles", "2", "--policy", policy, "--audit", audit, "--json")
    told = ran.object
    assert (ran.code, ran.err) == (0, "")
    assert (told["ok"], told["serving_version"], told["errors"]) == (True, 2, [])
    first, second = told["cycles"]
    assert first["tokens"] != second["tokens"]
    goals = ["refit"] if policy == "always_on" else ["release", "refit"]
    assert [cycle["goal"] for cycle in second["cycles"]] == goals
    assert told["answers"] >= 2 * 2 * 3
    assert verify_file(audit).serving_version == 2


def test_a_users_policy_and_an_older_server(cli: Cli, tmp_path: Path) -> None:
    """A policy by path, with checksums, on servers without sessions."""
    policy = tmp_path / "mine.toml"
    policy.write_text(
        'description = "mine"\nrelease = ["kv_cache"]\nverify = "checksum"\nchunk_bytes_max = 200000\n'
    )
    ran = cli(
        "demo", "--servers", "2", "--cycles", "1", "--policy", policy, "--sglang-version", "0.5.16", "--json"
    )
    assert ran.code == 0
    assert "begin" not in ran.object["cycles"][0]["cycles"][1]["phases_s"]


def test_plain_lines_where_nobody_watches(cli: Cli) -> None:
    """Without a terminal there are no control sequences: a title, a line per cycle, the verdicts."""
    ran = cli("demo", "--servers", "1", "--cycles", "2")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    lines = ran.out.splitlines()
    assert [line.split(":")[0] for line in lines[1:3]] == ["cycle 1/2", "cycle 2/2"]
    assert [line.split(" ")[0] for line in lines[3:]] == ["ok:"] * 3


def test_a_terminal_shows_the_fleet() -> None:
    """On a terminal the table has every server and every cycle, and the last picture stays."""
    controller, terminal = os.openpty()
    environment = {**os.environ, "COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "refitfsm", "demo", "--servers", "2", "--cycles", "1"]
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=environment) as process:
        os.close(terminal)
        shown = _read_all(controller)
    assert process.returncode == 0
    for word in (
        "policy colocated",
        "memory",
        "in flight",
        "total ms",
        "audit holds",
    ):
        assert word in shown


def _read_all(descriptor: int) -> str:
    data = io.BytesIO()
    try:
        while chunk := os.read(descriptor, 65536):
            data.write(chunk)
    except OSError:
        pass  # a terminal without a writer ends in an error, not in an end of file
    os.close(descriptor)
    return data.getvalue().decode(errors="replace")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "nope"], "colocated"),
        (["--sglang-version", "0.4.1"], "0.5.10 to 0.5.23"),
        (["--servers", "0"], "--servers"),
        (["--audit", "{tmp}"], "exists already"),
        (["--audit", "{tmp}/none/x"], "cannot be created"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, tmp_path: Path, arguments: list[str], said: str) -> None:
    """Bad input exits 2 with one line and prints nothing else."""
    ran = cli("demo", "--cycles", "1", *[text.format(tmp=tmp_path) for text in arguments])
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.error
