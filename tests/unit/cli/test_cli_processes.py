"""What only a process of its own can show: signals, death, exit statuses."""

import selectors
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import WAIT_S, Simulated

from refitfsm.cli.main import main


@contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, which ends with the block."""
    command = [sys.executable, "-W", "error", "-m", "refitfsm", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    """Its first line on stdout, waited for."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(WAIT_S), "nothing was printed"
    return process.stdout.readline()


def post(url: str, body: bytes = b"{}") -> int:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return int(answer.status)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_simulated_server_stops_when_asked(number: signal.Signals) -> None:
    """Its URL comes first and answers; a signal ends it with 0 and no complaint."""
    with started("sim-server", "--port", "0", "--tp", "2", "--no-memory-saver") as server:
        url = first_line(server).split(" ")[0]
        assert post(f"{url}/flush_cache") == 200
        server.send_signal(number)
        out, err = server.communicate(timeout=WAIT_S)
    assert (server.returncode, out, err) == (0, "", "")


def test_a_fatal_call_ends_the_process_with_1(tmp_path: Path) -> None:
    """A resume of what was never released kills the server, as it does the real one: exit 1, one line."""
    with started("sim-server", "--port", "0") as server:
        url = first_line(server).split(" ")[0]
        with pytest.raises(OSError):  # noqa: PT011 - the connection is cut in one way or another
            post(f"{url}/resume_memory_occupation")
        _, err = server.communicate(timeout=WAIT_S)
    assert server.returncode == 1
    assert err.count("\n") == 1
    assert "killed: KeyError" in err


def test_a_fault_that_kills_ends_the_process_with_1() -> None:
    """--fault reaches the server: the second flush kills it at once."""
    with started("sim-server", "--port", "0", "--fault", "kill@/flush_cache:2") as server:
        url = first_line(server).split(" ")[0]
        assert post(f"{url}/flush_cache") == 200
        with pytest.raises(OSError):  # noqa: PT011
            post(f"{url}/flush_cache")
        _, err = server.communicate(timeout=WAIT_S)
    assert server.returncode == 1
    assert "fault at /flush_cache" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sglang-version", "0.4.0"], "0.5.10 to 0.5.23"),
        (["--fault", "explode@/x"], "no kind of fault"),
        (["--model", "/nowhere"], "does not exist"),
        (["--port", "99999"], "--port"),
        (["--host", "192.0.2.1"], "cannot be listened on"),
        (["--api-key-env", "REFITFSM_NO_SUCH_KEY"], "is not set"),
    ],
)
def test_a_server_that_cannot_be_started_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """Bad input to sim-server exits 2 with one line."""
    assert main(["sim-server", "--port", "0", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_ctrl_c_says_where_the_servers_are(
    sim: Simulated, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """An interrupt in a push ends with 130 and one line: which server is left how, and what to do."""
    url = sim.start(faults=["hang-before@/update_weights_from_tensor"])
    audit = tmp_path / "audit.jsonl"
    with started("run", "--server", url, "--weights", checkpoints[1], "--audit", audit) as process:
        first_line(process)
        _wait_for(audit, '"pending":{"command":{"kind":"push"')
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert err.count("\n") == 1
    assert "interrupted in cycle 3 (refit of version 1)" in err
    assert (
        f"{url} is weights_staged, paused, without cuda_graph and kv_cache, with a push in flight: restart it"
        in err
    )


def _wait_for(path: Path, text: str) -> None:
    """Until a growing file holds a text."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, "it never came"
        threading.Event().wait(0.01)  # leaves the processor to the process that writes


def test_a_demo_that_is_interrupted_leaves_nothing() -> None:
    """Ctrl-C in a demo is 130 and one line, without warnings of what was left open."""
    with started("demo", "--cycles", "1000", "--servers", "2") as process:
        first_line(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert err.count("\n") == 1
    assert "interrupted" in err


def test_ctrl_c_while_connecting_says_that_nothing_was_done(
    sim: Simulated, checkpoints: tuple[Path, Path]
) -> None:
    """A server that is not ready is waited for, which is told; an interrupt then changes nothing."""
    url = sim.start()
    sim.wait(sim.servers[url].engine.pause("abort"))
    with started("run", "--server", url, "--weights", checkpoints[1]) as process:
        assert first_line(process) == "waiting for the servers to be ready ...\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert err == "refitfsm: interrupted while connecting: no server was asked to do anything\n"
