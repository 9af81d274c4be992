"""The processes of `server.py` start, fail and end as it says, shown on commands that cost nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real.server import ServerError, ServerProcess, eventually, free_port, greedy, members

DEADLINE_S = 30.0
ROOT = Path(__file__).resolve().parents[2]

# A parent and a child that live until they are killed.
FAMILY = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"

ORPHAN = """
import sys
from tests.real.test_server import FAMILY, process
running = process("-c", FAMILY)
running.start()
print(running.pid, flush=True)
sys.stdin.read()
"""


def process(*arguments: str, port: int | None = None, start_timeout_s: float = DEADLINE_S) -> ServerProcess:
    return ServerProcess(
        [sys.executable, *arguments],
        port=free_port() if port is None else port,
        env=dict(os.environ),
        ready_path="/",
        start_timeout_s=start_timeout_s,
    )


def test_a_server_is_ready_inside_and_gone_outside() -> None:
    """The context manager waits for an answer, and leaves neither processes nor files."""
    port = free_port()
    running = process("-m", "http.server", "--bind", "127.0.0.1", str(port), port=port)
    with running:
        assert members(running.pid) == [running.pid]
        assert "GET /" in running.log
        with pytest.raises(ServerError, match="/generate answered 501"):
            greedy(running.url, [1], 1)
    assert running.returncode == -signal.SIGTERM
    assert members(running.pid) == []
    assert running.log == ""


def test_a_start_that_ends_shows_why() -> None:
    """A server that ends instead of starting is reported with its status and the end of its log."""
    with pytest.raises(ServerError, match=r"ended with 3 instead of starting\n(.*\n)*no such model"):
        process("-c", "import sys; print('no such model'); sys.exit(3)").__enter__()


def test_a_start_that_hangs_is_given_up() -> None:
    """A server that does not get ready in its time is reported and removed with its children."""
    running = process("-c", FAMILY, start_timeout_s=0.5)
    with pytest.raises(ServerError, match=r"not ready after 0\.5 s"):
        running.__enter__()
    assert members(running.pid) == []


def test_a_kill_takes_the_children_along() -> None:
    """SIGKILL reaches the whole group, as a machine's failure would."""
    running = process("-c", FAMILY)
    running.start()
    try:
        eventually(lambda: len(members(running.pid)) == 2, "the child runs")
        running.kill()
        assert running.returncode == -signal.SIGKILL
        assert members(running.pid) == []
    finally:
        running.close()


def test_a_server_goes_with_the_process_that_started_it() -> None:
    """Even a killed test run leaves no server behind."""
    owner = subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        eventually(lambda: len(members(group)) == 2, "the child runs")
        owner.kill()
    eventually(lambda: members(group) == [], "the group is gone")
