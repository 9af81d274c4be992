"""The main job on real SGLang servers: refit between checkpoints, and what happens when one dies."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from refitfsm import CommandRefused, ConfigError, CycleAborted, Fleet, NotServing, RefitError
from refitfsm.audit.verify import verify_file
from refitfsm.drivers.sglang import SGLangDriver
from refitfsm.model.values import CommandKind
from tests.real.server import Greedy, RealServer, ServeReal, call, members, side_by_side
from tests.support.until import until

PROMPT = (5, 6, 7)
TOKENS = 8
BOUND_S = 60.0
"""Nobody waits longer than this for a cycle that cannot reach its goal."""


def fingerprint(url: str, greedy: Greedy) -> tuple[list[int], str]:
    """What tells weights apart from outside: greedy tokens, and the server's own checksum."""
    return greedy(url, PROMPT, TOKENS), call(url, "/weights_checker", {}).value["per_engine_checksum"]


@pytest.fixture(scope="module")
def pair(real_python: Path, checkpoint_a: Path, checkpoint_b: Path) -> tuple[RealServer, RealServer]:
    """A server started from each checkpoint, the second as the reference."""
    first, second = RealServer(real_python, checkpoint_a), RealServer(real_python, checkpoint_b)
    with side_by_side(first, second):
        yield first, second  # type: ignore[misc]


def test_the_command_refits_between_two_checkpoints(
    pair: tuple[RealServer, RealServer],
    checkpoint_a: Path,
    checkpoint_b: Path,
    greedy: Greedy,
    tmp_path: Path,
) -> None:
    """`refitfsm run` leaves the server as one started from each checkpoint, and its audit holds."""
    server, reference = pair
    expected = {"a": fingerprint(server.url, greedy), "b": fingerprint(reference.url, greedy)}
    assert expected["a"] != expected["b"]
    for number, (names, folders) in enumerate(
        (("b", [checkpoint_b]), ("ba", [checkpoint_b, checkpoint_a]), ("ab", [checkpoint_a, checkpoint_b]))
    ):
        audit = tmp_path / f"audit{number}.jsonl"
        command = [sys.executable, "-m", "refitfsm", "run", "--server", server.url, "--policy", "always_on"]
        for folder in folders:
            command += ["--weights", str(folder)]
        done = subprocess.run(
            [*command, "--audit", str(audit), "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)
        assert fingerprint(server.url, greedy) == expected[names[-1]]
        assert str(call(server.url, "/model_info").value["weight_version"]).endswith(f":{len(folders)}")
        assert verify_file(audit).committed == len(folders) + 1


def test_a_colocated_fleet_goes_through_three_cycles(
    real_server_saver: RealServer, checkpoint_a: Path, checkpoint_b: Path, greedy: Greedy, tmp_path: Path
) -> None:
    """Three colocated cycles with requests between: each answer is of the checkpoint that was pushed."""
    url = real_server_saver.url
    audit = tmp_path / "audit.jsonl"

    async def life() -> list[list[int]]:
        seen = [greedy(url, PROMPT, TOKENS)]
        async with Fleet.connect([url], policy="colocated", journal=audit) as fleet:
            for version, folder in enumerate((checkpoint_b, checkpoint_a, checkpoint_b), start=1):
                running = asyncio.create_task(
                    fleet.generate(PROMPT, {"max_new_tokens": 400, "ignore_eos": True})
                )
                await until(lambda: any(fleet.status().in_flight.values()))
                report = await fleet.release()
                assert report.cycle > 0
                assert (await running).version == version - 1
                with pytest.raises(NotServing):
                    await fleet.generate(PROMPT)
                await fleet.refit(folder, version)
                answer = await fleet.generate(PROMPT, {"temperature": 0, "max_new_tokens": TOKENS})
                assert answer.version == version
                seen.append(list(answer.output_ids))
            await fleet.refit(checkpoint_a, 4)
        return seen

    start, first, second, third = asyncio.run(life())
    assert first == third != second == start
    assert verify_file(audit).committed == 5


async def _cycle(fleet: Fleet, folder: Path) -> None:
    await fleet.release()
    await fleet.refit(folder, 1)


async def _refusals(
    fleet: Fleet, folder: Path, other: Path
) -> list[tuple[str, Callable[[], Awaitable[object]]]]:
    return [
        ("refit with a version that is served", lambda: fleet.refit(folder, 0)),
        ("refit from a folder that is not there", lambda: fleet.refit(folder / "nothing", 9)),
        ("refit with other tensors", lambda: fleet.refit(other, 9)),
        ("an empty prompt", lambda: fleet.generate([])),
    ]


def test_what_is_refused_sends_nothing(
    real_server_saver: RealServer, checkpoint_a: Path, greedy: Greedy, tmp_path: Path
) -> None:
    """Every refusal of the library leaves a real server as it was, and names the rule."""
    from refitfsm.weights.files import write_safetensors  # noqa: PLC0415

    url = real_server_saver.url
    before = fingerprint(url, greedy)
    other = tmp_path / "other"
    other.mkdir()
    write_safetensors(other / "model.safetensors", {"model.nope.weight": ("F32", (2,), bytes(8))})

    async def life() -> None:
        async with Fleet.connect([url], policy="colocated") as fleet:
            label = call(url, "/model_info").value["weight_version"]
            for what, work in await _refusals(fleet, checkpoint_a, other):
                with pytest.raises((ConfigError, CommandRefused)):
                    await work()
                assert call(url, "/model_info").value["weight_version"] == label, what
            await fleet.release()
            assert (await fleet.release()).cycle == 0
            with pytest.raises(CommandRefused, match="weights_were_kept"):
                await fleet.resume()
            with pytest.raises(CommandRefused, match="servers_are_serving"):
                await fleet.invalidate_kv_cache()
            await fleet.refit(checkpoint_a, 1)

    asyncio.run(life())
    assert fingerprint(url, greedy) == before


def test_a_server_that_does_not_fit_the_policy_is_refused(real_server: RealServer) -> None:
    """Colocated on a server without the memory saver is refused before anything is released."""

    async def life() -> None:
        with pytest.raises(ConfigError, match="--enable-memory-saver"):
            async with Fleet.connect([real_server.url], policy="colocated"):
                raise AssertionError("the server was taken")

    asyncio.run(life())
    assert call(real_server.url, "/ready").status == 200


@pytest.mark.parametrize("kind", [CommandKind.RELEASE, CommandKind.PUSH])
def test_a_server_killed_in_mid_cycle_is_reported_and_nobody_hangs(
    kind: CommandKind,
    serve: ServeReal,
    checkpoint_b: Path,
    greedy: Greedy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL as a command starts: the cycle ends at once and says who died; the other is not mixed."""
    survivor, victim = serve(memory_saver=True), serve(memory_saver=True)
    before = greedy(survivor.url, PROMPT, TOKENS)
    execute = SGLangDriver.execute

    async def killing(self: SGLangDriver, issued: object) -> object:
        if issued.server == victim.url and issued.command.kind is kind:  # type: ignore[attr-defined]
            victim.kill()
        return await execute(self, issued)  # type: ignore[arg-type]

    audit = tmp_path / "audit.jsonl"

    async def life() -> RefitError:
        async with Fleet.connect([survivor.url, victim.url], policy="colocated", journal=audit) as fleet:
            monkeypatch.setattr(SGLangDriver, "execute", killing)
            started = time.monotonic()
            with pytest.raises(CycleAborted) as caught:
                await _cycle(fleet, checkpoint_b)
            assert time.monotonic() - started < BOUND_S
            assert fleet.status().serving_version == 0
            return caught.value

    error = asyncio.run(life())
    assert isinstance(error, CycleAborted)
    assert victim.url in error.lost
    assert victim.url in str(error)
    assert verify_file(audit).aborted == 1
    if kind is CommandKind.PUSH:  # its weights were released: it can only wait, paused, for the next refit
        assert call(survivor.url, "/ready").status == 503
    elif call(survivor.url, "/ready").status == 200:  # it had not released yet, and went back
        assert greedy(survivor.url, PROMPT, TOKENS) == before


def _scheduler(server: RealServer) -> int:
    """The process that holds a server's weights."""
    for pid in members(server.pid):
        if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("the server has no scheduler")


def test_a_server_that_hangs_in_a_push_is_not_written_to_again(
    serve: ServeReal, checkpoint_b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that is stopped in mid-push: the cycle ends by the deadline, and the server is suspect."""
    policy = tmp_path / "short.toml"
    policy.write_text('description = "short"\n[deadlines_s]\npush = 4\n')
    server = serve()
    scheduler = _scheduler(server)
    execute = SGLangDriver.execute

    async def stopping(self: SGLangDriver, issued: object) -> object:
        if issued.command.kind is CommandKind.PUSH:  # type: ignore[attr-defined]
            os.kill(scheduler, signal.SIGSTOP)
        return await execute(self, issued)  # type: ignore[arg-type]

    async def life() -> None:
        async with Fleet.connect([server.url], policy=policy, journal=tmp_path / "audit.jsonl") as fleet:
            monkeypatch.setattr(SGLangDriver, "execute", stopping)
            started = time.monotonic()
            with pytest.raises(CycleAborted, match="no answer to push"):
                await fleet.refit(checkpoint_b, 1)
            assert time.monotonic() - started < BOUND_S
            os.kill(scheduler, signal.SIGCONT)
            with pytest.raises(CommandRefused, match="servers_are_trusted"):
                await fleet.refit(checkpoint_b, 2)

    asyncio.run(life())
    assert verify_file(tmp_path / "audit.jsonl").aborted == 1


def test_keys_are_used_and_never_shown(serve: ServeReal, checkpoint_a: Path, tmp_path: Path) -> None:
    """With an API key and an admin key a refit works; without them the error says so; no key is written."""
    key, admin = "ordinary-key-1", "admin-key-2"
    server = serve(flags=["--api-key", key, "--admin-api-key", admin])
    audit = tmp_path / "audit.jsonl"

    async def life() -> str:
        with pytest.raises(ConfigError) as caught:
            async with Fleet.connect([server.url], policy="always_on"):
                raise AssertionError("the server let a stranger in")
        fleet = Fleet.connect(
            [server.url], policy="always_on", journal=audit, api_key=key, admin_api_key=admin
        )
        async with fleet:
            await fleet.refit(checkpoint_a, 1)
            await fleet.generate(PROMPT)
        return str(caught.value)

    said = asyncio.run(life())
    assert "api_key" in said
    written = audit.read_text() + said
    assert key not in written
    assert admin not in written
    assert os.path.getsize(audit) > 0  # noqa: PTH202
