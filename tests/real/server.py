"""Real SGLang servers as context managers: started in a session of their own, always gone afterwards.

`ServerProcess` runs any server command; `RealServer` is SGLang 0.5.23 on CPU in the environment that
`environment.py` builds. The standard library is all this uses.
"""

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

STANDINS = Path(__file__).resolve().parent / "standins"
HOST = "127.0.0.1"
POLL_S = 0.1
LOG_TAIL_LINES = 40

# Below the range that the kernel hands to outgoing connections: a server binds its port some 20 s after it
# was probed, and tests beside it open thousands of connections.
_PORTS = range(20_000, 32_000)
_given: set[int] = set()


class ServerError(Exception):
    """A server ended, or did not get ready in time; carries the end of its log."""


class Answer(NamedTuple):
    """An HTTP answer. `value` is decoded JSON, or text where the body is not JSON."""

    status: int
    value: Any


class NoAnswerError(Exception):
    """The connection was refused, reset or timed out before an answer came."""


# Runs beside each server. Its input ends with the process that started it, however that ends: then the
# server's group and folder go too, unless a byte came before to say that nothing is left to do.
_GUARD = """
import os, shutil, signal, sys
if not sys.stdin.buffer.read(1):
    try:
        os.killpg(int(sys.argv[1]), signal.SIGKILL)
    except ProcessLookupError:
        pass
    shutil.rmtree(sys.argv[2], ignore_errors=True)
"""

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(url: str, path: str, body: object = None, *, timeout_s: float = 60.0) -> Answer:
    """POST `body` as JSON, or GET when there is none. An error status is an answer like any other.

    Raises:
        NoAnswerError: nothing came back; whether the server has acted is not known.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            status, content = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, content = error.code, error.read()
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswerError(f"{path}: {error!r}") from error
    try:
        return Answer(status, json.loads(content))
    except ValueError:
        return Answer(status, content.decode(errors="replace"))


def greedy(url: str, input_ids: Sequence[int], n: int) -> list[int]:
    """The `n` most likely tokens after `input_ids`, end-of-text ignored."""
    sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
    answer = call(url, "/generate", {"input_ids": list(input_ids), "sampling_params": sampling})
    if answer.status != 200:
        raise ServerError(f"/generate answered {answer.status}: {answer.value}")
    tokens: list[int] = answer.value["output_ids"]
    return tokens


def eventually(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll until `holds()`.

    Raises:
        ServerError: it did not come true in that time; `what` names it.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise ServerError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


def free_port() -> int:
    """A loopback port that nobody listens on, no outgoing connection will get and none was given before."""
    ports = [port for port in _PORTS if port not in _given]
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            _given.add(port)
            return port
    raise ServerError(f"no free port in {_PORTS}")


class ServerProcess:
    """One server process with its children: `start`, `wait_ready`, use `url`, `stop` or `kill`.

    As a context manager it is ready inside and gone outside, children included; and it is gone, too, when the
    process that started it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        env: Mapping[str, str],
        ready_path: str,
        start_timeout_s: float,
    ) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self._command = list(command)
        self._env = dict(env)
        self._ready_path = ready_path
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._deadline = 0.0

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The main process's id, which is its group's and its session's too."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """None while the main process runs; negative when a signal ended it."""
        return self._started().poll()

    @property
    def log(self) -> str:
        """All that the server has printed. Empty after `close`."""
        if self._folder is None:
            return ""
        return (self._folder / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start the process; returns at once."""
        if self._process is not None:
            raise ServerError("this server was started before: make a new one")
        self._folder = Path(tempfile.mkdtemp(prefix="refitfsm-server-"))
        # SGLang leaves files behind in its temporary folder; here they go with the log.
        env = self._env | {"TMPDIR": str(self._folder)}
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a dying SGLang kills its whole process tree
            )
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(self._process.pid), str(self._folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._deadline = time.monotonic() + self._start_timeout_s

    def wait_ready(self) -> None:
        """Return once the server takes requests.

        Raises:
            ServerError: it ended instead, or its time to start is over.
        """
        process = self._started()
        while process.poll() is None:
            with contextlib.suppress(NoAnswerError):
                if call(self.url, self._ready_path, timeout_s=30).status == 200:
                    return
            if time.monotonic() > self._deadline:
                raise ServerError(f"not ready after {self._start_timeout_s:g} s\n{self._tail()}")
            time.sleep(POLL_S)
        raise ServerError(f"ended with {process.returncode} instead of starting\n{self._tail()}")

    def wait_exit(self, timeout_s: float) -> int:
        """Wait until the server has ended by itself; its exit status.

        Raises:
            ServerError: it still runs after that time.
        """
        try:
            return self._started().wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerError(f"still running after {timeout_s:g} s\n{self._tail()}") from None

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM to the main process, as an operator would; its exit status.

        Raises:
            ServerError: it still runs after that time.
        """
        process = self._started()
        if process.poll() is None:
            process.terminate()
        return self.wait_exit(timeout_s)

    def kill(self) -> None:
        """SIGKILL to the whole group. Returns when all of it is gone. Idempotent."""
        process = self._started()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        eventually(lambda: not members(process.pid), f"group {process.pid} is gone")

    def close(self) -> None:
        """Stop the server if it runs, make sure that no child is left, remove log and temporary files."""
        if self._process is not None:
            with contextlib.suppress(ServerError):
                self.stop()
            self.kill()
        if self._guard is not None:
            self._guard.communicate(b".")
            self._guard = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process

    def _tail(self) -> str:
        return "\n".join(line[:400] for line in self.log.splitlines()[-LOG_TAIL_LINES:])


class RealServer(ServerProcess):
    """SGLang 0.5.23 on CPU, serving a tiny checkpoint with no tokenizer: requests carry `input_ids`.

    `python` is the environment's interpreter, `memory_saver` turns `--enable-memory-saver` on with the
    stand-in for torch_memory_saver, `flags` and `env` are added to the recipe's, and `pythonpath` holds
    further folders to import from, such as that of a custom weight loader.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        tp: int = 1,
        memory_saver: bool = False,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        pythonpath: Sequence[Path] = (),
        start_timeout_s: float = 600.0,
    ) -> None:
        port = free_port()
        command = [str(python), "-m", "sglang.launch_server", *recipe_flags(model, port)]
        if tp > 1:
            command += ["--tp", str(tp)]
        if memory_saver:
            command += ["--enable-memory-saver"]
        folders = [STANDINS, *([STANDINS / "saver"] if memory_saver else []), *pythonpath]
        super().__init__(
            [*command, *flags],
            port=port,
            env=recipe_env(folders, tp) | dict(env or {}),
            ready_path="/ready",  # 200 once the warm-up is over; runs nothing, unlike /health
            start_timeout_s=start_timeout_s,
        )


ServeReal = Callable[..., RealServer]
"""Starts a server with options of `RealServer`; the fixture `serve`."""

Greedy = Callable[[str, Sequence[int], int], list[int]]
"""See `greedy`; the fixture of that name."""


def recipe_flags(model: Path, port: int) -> list[str]:
    """What makes SGLang serve on CPU, with limits that fit a tiny model."""
    valued = {
        "--model-path": str(model),
        "--device": "cpu",
        "--dtype": "float32",
        "--host": HOST,
        "--port": str(port),
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--max-total-tokens": "4096",
        "--context-length": "1024",
        "--max-running-requests": "8",
        "--chunked-prefill-size": "512",
    }
    switches = [
        "--skip-tokenizer-init",
        "--disable-cuda-graph",
        "--disable-overlap-schedule",
        "--sleep-on-idle",  # an idle scheduler otherwise spins on a core of its own
    ]
    return [part for item in valued.items() for part in item] + switches


def recipe_env(folders: Sequence[Path], tp: int) -> dict[str, str]:
    """The caller's environment, less what would reach into the server's Python, plus the recipe's."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONHOME", "PYTHONWARNINGS"}}
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "NO_PROXY": HOST,
        "no_proxy": HOST,
    }
    if tp > 1:  # else SGLang asks for one NUMA node a rank
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
    return env


@contextlib.contextmanager
def side_by_side(*servers: ServerProcess) -> Iterator[None]:
    """Start all, then wait for all: a start is mostly imports, so two cost little more than one."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
            server.start()
        for server in servers:
            server.wait_ready()
        yield


def members(group: int) -> list[int]:
    """The living processes of a process group; those that only wait to be reaped do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
        except OSError:
            continue
        state, _, pgrp = status.rpartition(")")[2].split()[:3]
        if int(pgrp) == group and state not in "ZX":
            found.append(int(entry.name))
    return found
