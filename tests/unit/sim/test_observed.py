"""Everything that was seen of real servers, replayed against the simulated one."""

import json
from pathlib import Path
from typing import Any

import pytest

from refitfsm.sim.loop import run

from .replay import Replay

DATA = Path(__file__).parents[2] / "data"


def _h200() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "sglang-0.5.16-h200.jsonl").read_text().splitlines()]


def _cpu() -> list[dict[str, Any]]:
    scenarios: list[dict[str, Any]] = json.loads((DATA / "sglang-0.5.23-cpu.json").read_text())["scenarios"]
    return scenarios


@pytest.mark.parametrize("scenario", _h200(), ids=lambda each: each["scenario"])
def test_does_what_a_real_server_did_on_a_gpu(scenario: dict[str, Any]) -> None:
    """Every answer and every death seen of SGLang 0.5.16 on an H200 is the simulator's too."""
    run(Replay(scenario).run())


@pytest.mark.parametrize("scenario", _cpu(), ids=lambda each: each["scenario"])
def test_does_what_a_real_server_did_on_a_cpu(scenario: dict[str, Any]) -> None:
    """Every answer and every death seen of SGLang 0.5.23 and 0.5.16 on a CPU is the simulator's too."""
    run(Replay(scenario).run())
