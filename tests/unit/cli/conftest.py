"""Simulated servers in a thread of their own, and the command line in this one."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from refitfsm.cli.main import main
from refitfsm.cli.simulated import load_parameters
from refitfsm.sim.config import FAST, SimConfig
from refitfsm.sim.faults import FaultPlan, parse_fault
from refitfsm.sim.http import HttpFace, serve
from refitfsm.sim.server import SimServer
from refitfsm.weights.files import tiny_checkpoint
from tests.support.loop_thread import LoopThread

WAIT_S = 20.0


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, object]:
        """The one JSON object on stdout."""
        data = json.loads(self.out)
        assert isinstance(data, dict)
        return data

    @property
    def error(self) -> str:
        """The one line on stderr."""
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        return self.err.strip()


class Cli:
    """Runs commands in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str | Path) -> Ran:
        self._capture.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = self._capture.readouterr()
        return Ran(code, out, err)


class Simulated:
    """Starts servers; all of them end with the test."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.servers: dict[str, SimServer] = {}
        self._faces: list[HttpFace] = []
        self._loop = LoopThread()
        self.wait = self._loop.wait

    def start(self, config: SimConfig | None = None, faults: Sequence[str] = ()) -> str:
        """One server, in 0 time per call; its URL."""
        given = dataclasses.replace(
            config or SimConfig(),
            parameters=load_parameters(self.model),
            model_path=str(self.model),
            timings=dataclasses.replace(FAST, death_s=(0.05, 0.05), exit_noticed_s=(0.0, 0.0)),
        )
        plan = FaultPlan(map(parse_fault, faults))

        async def begin() -> tuple[SimServer, HttpFace]:
            server = SimServer(given, name=f"server {len(self._faces)}")
            return server, await serve(server, faults=plan)

        server, face = self.wait(begin())
        self._faces.append(face)
        self.servers[face.url] = server
        return face.url

    def close(self) -> None:
        for face in self._faces:
            self.wait(face.stop())
        self._loop.close()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return tiny_checkpoint(folder / "a", 1), tiny_checkpoint(folder / "b", 2)


@pytest.fixture
def sim(checkpoints: tuple[Path, Path]) -> Iterator[Simulated]:
    simulated = Simulated(checkpoints[0])
    yield simulated
    simulated.close()
