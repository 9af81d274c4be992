"""`refitfsm doctor`: what it says of a server, and that it sends nothing that could hurt."""

import dataclasses

import pytest
from conftest import Cli, Simulated

from refitfsm.sim.config import SimConfig


def test_a_server_with_the_saver_fits_every_policy(cli: Cli, sim: Simulated) -> None:
    """All shipped policies fit, and the server is ready."""
    url = sim.start()
    ran = cli("doctor", "--server", url)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count(" fits\n") == 3
    told = cli("doctor", "--server", url, "--json").object
    assert (told["fits"], told["ready"], told["misfits"]) == (True, True, [])
    assert told["capabilities"]["sglang_version"] == "0.5.23"


def test_without_the_saver_always_on_is_left(cli: Cli, sim: Simulated) -> None:
    """Policies that release say what to start the server with; exit 0, for one fits."""
    url = sim.start(SimConfig(memory_saver=False))
    told = cli("doctor", "--server", url, "--json")
    assert told.code == 0
    policies = told.object["policies"]
    assert policies["always_on"] == {"fits": True, "missing": ""}
    assert not policies["colocated"]["fits"]
    assert "--enable-memory-saver" in policies["colocated"]["missing"]


@pytest.mark.parametrize(
    ("reads_back", "said"), [(True, "yes"), (False, "no: SGLang's Qwen3ForCausalLM does not")]
)
def test_it_says_whether_a_sample_can_be_read_back(
    cli: Cli, sim: Simulated, reads_back: bool, said: str
) -> None:
    """By the model's architecture, not by trying."""
    url = sim.start(SimConfig(reads_back=reads_back))
    assert cli("doctor", "--server", url, "--json").object["read_back"] == said
    assert f"reads back      {said}\n" in cli("doctor", "--server", url).out


def test_a_version_without_ready_is_not_probed(cli: Cli, sim: Simulated) -> None:
    """Where there is no /ready its question is left open: /health would run a token."""
    url = sim.start(SimConfig(sglang_version="0.5.12"))
    told = cli("doctor", "--server", url, "--json").object
    assert told["fits"] is True
    assert told["ready"] is None
    assert sim.servers[url].truth.answers == []


def test_a_paused_server_is_read_and_told_of(cli: Cli, sim: Simulated) -> None:
    """Reading works whatever the server's state, and changes nothing in it."""
    url = sim.start()
    truth = sim.servers[url].truth
    sim.wait(sim.servers[url].engine.pause("abort"))
    before = (truth.version_front, truth.gate_closed, truth.weights_digest())
    told = cli("doctor", "--server", url, "--json").object
    assert (truth.version_front, truth.gate_closed, truth.weights_digest()) == before
    assert truth.alive
    assert told["fits"] is True


@pytest.mark.parametrize("version", ["0.9.0", "main"])
def test_a_version_that_is_not_known_fits_nothing(cli: Cli, sim: Simulated, version: str) -> None:
    """A server of an unread version is exit 1, with the versions that are known."""
    url = sim.start()
    engine = sim.servers[url].engine
    engine.profile = dataclasses.replace(engine.profile, version=version)
    ran = cli("doctor", "--server", url, "--json")
    assert ran.code == 1
    assert ran.object["fits"] is False
    assert version in str(ran.object["misfits"])


def test_missing_keys_are_named(cli: Cli, sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that asks for a key says so in one line; with the key it is read."""
    monkeypatch.setenv("KEY", "s3cret")
    url = sim.start(SimConfig(api_key="s3cret"))
    refused = cli("doctor", "--server", url)
    assert refused.code == 2
    assert "--api-key-env" in refused.error
    ran = cli("doctor", "--server", url, "--api-key-env", "KEY")
    assert ran.code == 0
    assert "s3cret" not in ran.out


@pytest.mark.parametrize("server", ["http://127.0.0.1:9", "127.0.0.1:9/x", "http://"])
def test_a_wrong_address_is_one_line(cli: Cli, server: str) -> None:
    """Nobody there, or no address at all: exit 2 and one line."""
    ran = cli("doctor", "--server", server)
    assert (ran.code, ran.out) == (2, "")
    assert "127.0.0.1" in ran.error or "is no URL" in ran.error
