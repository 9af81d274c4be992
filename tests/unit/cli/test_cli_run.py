"""`refitfsm run`: what it does to servers, and with which exit status it says so."""

import dataclasses
from pathlib import Path

import pytest
from conftest import Cli, Simulated

from refitfsm.audit.verify import verify_file
from refitfsm.cli.simulated import load_parameters
from refitfsm.sim.config import SimConfig
from refitfsm.sim.content import digest_of
from refitfsm.weights.files import write_safetensors

Folders = tuple[Path, Path]


def servers(urls: list[str]) -> list[str]:
    """The options that name them."""
    return [word for url in urls for word in ("--server", url)]


def test_servers_end_with_the_last_weights(
    cli: Cli, sim: Simulated, checkpoints: Folders, tmp_path: Path
) -> None:
    """Two servers, weights in turn: both hold the last ones, and the audit holds."""
    a, b = checkpoints
    urls = [sim.start(), sim.start()]
    audit = tmp_path / "run.jsonl"
    ran = cli("run", *servers(urls), "--weights", b, "--weights", a, "--cycles", "3", "--audit", audit)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("2 of 2 servers serve version") == 3
    wanted = digest_of(load_parameters(b))
    assert {server.truth.weights_digest() for server in sim.servers.values()} == {wanted}
    assert verify_file(audit).serving_version == 3


def test_the_object_tells_everything(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """With --json stdout is one object: refits, phase times, tokens per server, states."""
    a, b = checkpoints
    urls = sorted([sim.start(), sim.start()])
    ran = cli("run", *servers(urls), "--weights", b, "--weights", a, "--prompt-ids", "5,6", "--json")
    told = ran.object
    assert ran.code == 0
    assert (told["outcome"], told["serving_version"], told["error"]) == ("committed", 2, None)
    first, second = told["refits"]
    assert [cycle["goal"] for cycle in first["cycles"]] == ["release", "refit"]
    assert set(first["cycles"][1]["phases_s"]) >= {"resume", "push", "verify", "continue"}
    assert sorted(first["tokens"]) == urls
    assert len({tuple(tokens) for tokens in first["tokens"].values()}) == 1
    assert first["tokens"] != second["tokens"]
    assert [server["serves"] for server in told["servers"]] == [True, True]


def test_a_policy_that_keeps_memory_releases_nothing(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """Under always_on a server without the memory saver is refitted, and no release cycle runs."""
    url = sim.start(SimConfig(memory_saver=False))
    ran = cli("run", "--server", url, "--weights", checkpoints[1], "--policy", "always_on", "--json")
    assert ran.code == 0
    assert [cycle["goal"] for cycle in ran.object["refits"][0]["cycles"]] == ["refit"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--weights", "{a}/none"], "does not exist"),
        (["--weights", "{a}", "--policy", "nope"], "one of always_on, colocated, kv_only"),
        (["--weights", "{a}", "--policy", "{tmp}/odd.toml"], "keys are"),
        (["--weights", "{a}", "--server", "{url}/"], "given twice"),
        (["--weights", "{a}", "--api-key-env", "REFITFSM_NO_SUCH_KEY"], "REFITFSM_NO_SUCH_KEY: is not set"),
        (["--weights", "{a}", "--prompt-ids", "5,x"], '"5,6,7"'),
        (["--weights", "{a}", "--gpus", "{url}"], "URL=UUID"),
        (["--weights", "{a}", "--gpus", "http://127.0.0.1:9=GPU-1"], "is no --server"),
        (["--weights", "{a}", "--server", "ftp://x"], "http://HOST:PORT"),
        (["--weights", "{a}", "--cycles", "0"], "--cycles"),
        (["--weights", "{a}", "--audit", "{tmp}/odd.toml"], "exists already"),
        (["--weights", "{a}", "--audit", "{tmp}/none/x"], "cannot be created"),
        (["--weights", "{tmp}"], "holds no *.safetensors"),
        ([], "--weights"),
        (["--weights", "{a}", "--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_sent(
    cli: Cli, sim: Simulated, checkpoints: Folders, tmp_path: Path, *, arguments: list[str], said: str
) -> None:
    """Bad input exits 2 with one line that names it, and the server is not asked to do anything."""
    (tmp_path / "odd.toml").write_text('description = "odd"\nspeed = 3\n')
    url = sim.start()
    given = [text.format(a=checkpoints[0], tmp=tmp_path, url=url) for text in arguments]
    ran = cli("run", "--server", url, *given)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.error
    assert sim.servers[url].truth.version_front == "default"


def test_a_server_that_is_not_there_is_named(cli: Cli, checkpoints: Folders) -> None:
    """Nobody listens: exit 2 and the address."""
    ran = cli("run", "--server", "http://127.0.0.1:9", "--weights", checkpoints[0])
    assert ran.code == 2
    assert "http://127.0.0.1:9: nobody listens" in ran.error


def test_without_the_memory_saver_colocated_names_the_remedy(
    cli: Cli, sim: Simulated, checkpoints: Folders
) -> None:
    """A policy that releases does not fit: exit 2, with the option and the other policy."""
    url = sim.start(SimConfig(memory_saver=False))
    ran = cli("run", "--server", url, "--weights", checkpoints[0])
    assert ran.code == 2
    assert "--enable-memory-saver" in ran.error
    assert "always_on" in ran.error


def test_weights_of_another_model_are_seen_before_the_release(
    cli: Cli, sim: Simulated, tmp_path: Path
) -> None:
    """A folder that does not fit is refused while the server still has its memory and serves."""
    write_safetensors(tmp_path / "x.safetensors", {"odd": ("F32", (1,), b"\0\0\0\0")})
    url = sim.start()
    ran = cli("run", "--server", url, "--weights", tmp_path, "--json")
    assert ran.code == 2
    assert ran.object["outcome"] == "refused"
    assert ran.object["servers"][0]["serves"] is True
    assert "no weights were sent" in ran.error
    truth = sim.servers[url].truth
    assert not truth.memory.released
    assert not truth.gate_closed


def test_a_clean_abort_is_3(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """A server refuses before its weights are touched and serves the old version again: exit 3."""
    url = sim.start(faults=["status-before=400@/begin_weight_update"])
    ran = cli("run", "--server", url, "--weights", checkpoints[1], "--policy", "always_on", "--json")
    assert ran.code == 3
    assert (ran.object["outcome"], ran.object["serving_version"]) == ("aborted", 0)
    assert url in ran.error
    assert not sim.servers[url].truth.gate_closed


def test_a_server_that_is_left_without_weights_is_4(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """An abort that loses no server, but leaves one released, needs a restart: that is no clean abort."""
    url = sim.start(faults=["status-before=400@/begin_weight_update"])
    ran = cli("run", "--server", url, "--weights", checkpoints[1])
    assert ran.code == 4
    assert "without cuda_graph and kv_cache: restart it" in ran.error


def test_a_lost_server_is_4(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """A server dies in the push: exit 4, and the line names it and the restart."""
    urls = [sim.start(faults=["kill@/update_weights_from_tensor"]), sim.start()]
    ran = cli("run", *servers(urls), "--weights", checkpoints[1], "--json")
    assert ran.code == 4
    assert ran.object["outcome"] == "lost"
    assert "restart" in ran.error
    assert urls[0] in ran.error


def test_a_server_that_dies_of_the_prompt_is_4(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """The refit committed and the server died after it: that it does not serve is what counts."""
    urls = [sim.start(faults=["kill@/generate"]), sim.start()]
    ran = cli("run", *servers(urls), "--weights", checkpoints[1], "--prompt-ids", "5", "--json")
    assert ran.code == 4
    assert f"{urls[0]} is offline" in ran.error
    assert list(ran.object["refits"][0]["tokens"]) == [urls[1]]


def test_a_prompt_that_broke_off_is_asked_again(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """One broken connection is not the end of a run."""
    url = sim.start(faults=["lose-answer@/generate"])
    ran = cli("run", "--server", url, "--weights", checkpoints[1], "--prompt-ids", "5", "--json")
    assert ran.code == 0
    assert len(ran.object["refits"][0]["tokens"][url]) == 16


def test_a_server_that_never_answers_a_prompt_is_3(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """The server lives and serves, but the run did not do what was asked."""
    url = sim.start(faults=["status-before=500@/generate:*"])
    ran = cli("run", "--server", url, "--weights", checkpoints[1], "--prompt-ids", "5", "--json")
    assert ran.code == 3
    assert ran.object["serving_version"] == 1
    assert "answered 500" in ran.error


def test_a_quarantined_server_is_4_even_when_the_others_commit(
    cli: Cli, sim: Simulated, checkpoints: Folders, tmp_path: Path
) -> None:
    """The others commit without it; a script still learns that one does not serve."""
    policy = tmp_path / "go_on.toml"
    policy.write_text('description = "go on"\non_failure = "quarantine"\n')
    urls = [sim.start(faults=["success-false=400@/update_weights_from_tensor"]), sim.start()]
    ran = cli("run", *servers(urls), "--weights", checkpoints[1], "--policy", policy, "--json")
    assert ran.code == 4
    assert ran.object["serving_version"] == 1
    assert f"{urls[0]} is weights_staged, quarantined" in ran.error


def test_keys_come_from_the_environment_and_are_shown_nowhere(
    cli: Cli, sim: Simulated, checkpoints: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that asks for keys is refitted with them; no output and no audit holds them."""
    monkeypatch.setenv("KEY_A", "s3cret-a")
    monkeypatch.setenv("KEY_B", "s3cret-b")
    config = SimConfig(api_key="s3cret-a", admin_api_key="s3cret-b")
    url = sim.start(config)
    audit = tmp_path / "run.jsonl"
    given = ("run", "--server", url, "--weights", checkpoints[1], "--audit")
    refused = cli(*given, tmp_path / "none.jsonl")
    assert refused.code == 2
    assert "api_key" in refused.error
    ran = cli(*given, audit, "--api-key-env", "KEY_A", "--admin-api-key-env", "KEY_B")
    assert ran.code == 0
    assert "s3cret" not in ran.out + ran.err + refused.err + audit.read_text()


def test_gpus_of_two_servers_must_differ(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """--gpus reaches the fleet: two servers on one GPU are refused under a policy that does not share."""
    urls = [sim.start(), sim.start()]
    ran = cli(
        "run",
        *servers(urls),
        "--weights",
        checkpoints[1],
        "--gpus",
        f"{urls[0]}=GPU-1",
        "--gpus",
        f"{urls[1]}=gpu-1",
    )
    assert ran.code == 2
    assert "share_gpus" in ran.error


def test_a_version_that_is_not_known_is_refused(cli: Cli, sim: Simulated, checkpoints: Folders) -> None:
    """A server that says it is a future release is left alone."""
    url = sim.start()
    engine = sim.servers[url].engine
    engine.profile = dataclasses.replace(engine.profile, version="0.9.0")
    ran = cli("run", "--server", url, "--weights", checkpoints[1])
    assert ran.code == 2
    assert "SGLang 0.9.0 is not known" in ran.error
