"""Random sequences, compared: two that are alike do not differ, and what differs is found."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from refitfsm.cli.simulated import load_parameters
from refitfsm.drivers.transport import Reply
from refitfsm.sim.config import FAST, SimConfig
from refitfsm.sim.conformance.__main__ import main
from refitfsm.sim.conformance.differential import Played, compare, planned
from refitfsm.sim.conformance.makers import simulated
from refitfsm.sim.conformance.report import all_alike, comparison
from refitfsm.sim.conformance.runner import Maker
from refitfsm.sim.http import serve
from refitfsm.sim.loop import run
from refitfsm.sim.server import SimServer
from refitfsm.weights.files import tiny_checkpoint
from tests.conformance.lying import lying
from tests.support.loop_thread import LoopThread

CONFIG = SimConfig(skip_warmup=True)
OLD = SimConfig(sglang_version="0.5.16", skip_warmup=True)
OK = Reply(200, b'{"success": true, "message": "Success"}')
LIES = {
    "/release_memory_occupation": Reply(200, b"null"),
    "/resume_memory_occupation": Reply(200, b"null"),
    "/pause_generation": Reply(200, b'{"message": "Generation paused successfully.", "status": "ok"}'),
    "/continue_generation": Reply(200, b'{"message": "Generation continued successfully.", "status": "ok"}'),
    "/flush_cache": Reply(200, b"Cache flushed.\n"),
    "/update_weights_from_tensor": OK,
    "/begin_weight_update": OK,
    "/update_weight_version": OK,
}
"""What a server answers that does nothing, by path."""


def played(make: Maker, config: SimConfig, sequences: int, deaths_max: int = 20) -> list[Played]:
    plan = planned(config, sequences, deaths_max=deaths_max)

    async def life() -> list[Played]:
        return [each async for each in compare(make, plan)]

    return run(life())


@pytest.mark.parametrize("config", [CONFIG, OLD, SimConfig(memory_saver=False, skip_warmup=True)])
def test_a_server_does_not_differ_from_itself(config: SimConfig) -> None:
    """Sixty sequences, twenty of which kill, are the same on two servers of one kind."""
    found = played(simulated(config), config, 60)
    assert [each.difference for each in found if each.difference is not None] == []
    assert len(found) == 60
    assert comparison(found)["deaths"] == 20


@pytest.mark.parametrize("path", sorted(LIES))
def test_a_server_that_does_nothing_differs(path: str) -> None:
    """Whatever call a server answers without doing anything, some sequence shows it."""
    assert not all_alike(played(lying({path: LIES[path]}), CONFIG, 60, deaths_max=5))


def test_another_release_differs() -> None:
    """A server without update sessions is told from one that has them, by the call that shows it."""
    found = played(simulated(OLD), CONFIG, 20, deaths_max=0)
    differing = [each.difference for each in found if each.difference is not None]
    assert differing
    assert all(each.calls[-1] != "ask" for each in differing)


def test_the_command_compares_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns the release from the server, plays nothing that kills, and writes what was said."""
    folders = [tiny_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("AB")]
    out = tmp_path / "out.json"
    loop = LoopThread()
    config = replace(OLD, parameters=load_parameters(folders[0]), timings=FAST)
    server = SimServer(config, name="subject")
    running = loop.wait(serve(server, "127.0.0.1", 0))
    try:
        where = ["--url", running.url, "--weights", *map(str, folders), "--out", str(out)]
        status = main([*where, "--random", "2", "--first", "42"])
    finally:
        loop.wait(running.stop())
        loop.close()
    assert (status, server.truth.alive) == (0, True)
    assert capsys.readouterr().out.endswith(" 0 deaths, 0 differences\n")
    found = json.loads(out.read_text())
    assert (found["sequences"], len(found["played"])) == (2, 2)
    assert {"calls", "said"} <= set(found["played"][0])
