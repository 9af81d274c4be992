"""A trainer that is killed while its push is on the way, and what a real server makes of it."""

import asyncio
import contextlib
import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from refitfsm import ConfigError, Fleet
from refitfsm.server import LOADER
from refitfsm.weights.files import tiny_checkpoint
from refitfsm.weights.torch_source import TorchSource
from tests.real.server import HOST, RealServer, call, eventually

ROOT = Path(__file__).resolve().parents[2]
PUSH = "/update_weights_from_tensor"
POLICY = """
description = "One way of pushing, and content is proved."
release = []
verify = "content"
push_strategy = "{strategy}"
"""


class Between(ThreadingHTTPServer):
    """Stands between a trainer and its server, and is told of each push before the server gets it."""

    daemon_threads = True

    def __init__(self, port: int, before_push: Callable[[int], None]) -> None:
        super().__init__((HOST, 0), _Handler)
        self.port = port
        self.before_push = before_push
        self.answers: list[int | None] = []
        """The status of each push; None where the server died of it."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Between

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - its name there

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == PUSH:
            self.server.before_push(len(self.server.answers) + 1)
        upstream = http.client.HTTPConnection(HOST, self.server.port, timeout=120)
        status: int | None = None
        try:
            upstream.request(self.command, self.path, body, {"Content-Type": "application/json"})
            with upstream.getresponse() as answer:
                status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            content = b""
        finally:
            upstream.close()
            if self.path == PUSH:
                self.server.answers.append(status)
        self.close_connection = status is None
        if status is not None:
            with contextlib.suppress(OSError):  # whoever asked may be dead
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)


def files_of(pid: int) -> list[Path]:
    """The files of shared memory that torch made in a process."""
    return list(Path("/dev/shm").glob(f"torch_{pid}_*"))


class Killed(NamedTuple):
    """A trainer that was killed in a push."""

    pid: int
    status: int | None
    """What the server answered to the push; None where it died."""


def killed_in_push(server: RealServer, tmp_path: Path, strategy: str, number: int) -> Killed:
    """Kill a trainer when it has sent its push of that number, and let the server have it then."""
    trainers: list[subprocess.Popen[bytes]] = []

    def before_push(at: int) -> None:
        if at == number:
            trainers[0].kill()
            trainers[0].wait()
            if number == 1:  # nobody else maps its memory: torch's own manager removes it
                eventually(lambda: not files_of(trainers[0].pid), "the dead trainer's memory is gone")

    policy = tmp_path / f"{strategy}.toml"
    policy.write_text(POLICY.format(strategy=strategy))
    between = Between(server.port, before_push)
    thread = threading.Thread(target=between.serve_forever)
    thread.start()
    folders = [str(tiny_checkpoint(tmp_path / f"sent{seed}", seed=seed)) for seed in (1, 2)]
    command = [sys.executable, "-m", "tests.with_torch.sender", between.url, str(policy), *folders]
    trainers.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}))
    try:
        trainers[0].wait(120)
        eventually(lambda: len(between.answers) == number, "the last push was answered", 120)
        return Killed(trainers[0].pid, between.answers[-1])
    finally:
        trainers[0].kill()
        trainers[0].wait()
        between.shutdown()
        between.server_close()
        thread.join()


async def refit(url: str, tmp_path: Path, seed: int) -> None:
    """What a new trainer does: connect, and push weights whose content is then proved."""
    policy = tmp_path / "new.toml"
    policy.write_text(POLICY.format(strategy="auto"))
    given = load_file(tiny_checkpoint(tmp_path / f"new{seed}", seed=seed) / "model.safetensors")
    async with Fleet.connect([url], policy=policy) as fleet:
        source = TorchSource(given, share_host_memory=True)
        await fleet.refit(source, 1)
        assert (await fleet.generate([1, 2, 3], {"max_new_tokens": 2})).version == 1
        source.close()


def test_a_server_outlives_a_trainer_that_dies_in_a_registered_push(tmp_path: Path) -> None:
    """A word from a dead trainer copies nothing, and the server lives; a new trainer's content is proved."""
    flags = ("--custom-weight-loader", LOADER)
    start = tiny_checkpoint(tmp_path / "start", seed=0)
    with RealServer(Path(sys.executable), start, flags=flags, pythonpath=(ROOT,)) as server:

        def checksum() -> str:
            answer = call(server.url, "/weights_checker", {"action": "checksum"})
            return str(answer.value["ranks"][0]["per_gpu_checksum"])

        killed = killed_in_push(server, tmp_path, "registered", 2)
        assert killed.status == 200
        kept = checksum()
        with pytest.raises(ConfigError, match="paused by somebody else"):
            asyncio.run(refit(server.url, tmp_path, 1))
        call(server.url, "/continue_generation", {})  # it stood where the dead trainer had paused it
        asyncio.run(refit(server.url, tmp_path, 1))
        assert checksum() == kept
        asyncio.run(refit(server.url, tmp_path, 2))
        assert checksum() != kept
    eventually(lambda: not files_of(killed.pid), "nothing of the dead trainer outlives the server")


def test_a_server_that_dies_of_a_dead_trainers_push_is_seen_dead(tmp_path: Path) -> None:
    """Handles whose memory has gone with its trainer kill the server: it is refused, and nothing is left."""
    with RealServer(Path(sys.executable), tiny_checkpoint(tmp_path / "start", seed=0)) as server:
        killed = killed_in_push(server, tmp_path, "list", 1)
        assert killed.status is None
        server.wait_exit(60)
        with pytest.raises(ConfigError, match=rf"cannot connect: {server.url}: nobody listens"):
            asyncio.run(refit(server.url, tmp_path, 2))
    assert files_of(killed.pid) == []
