"""The conformance checks on a real SGLang server on CPU, with and without the memory saver's stand-in."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from refitfsm.drivers.http import HttpTransport
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource
from tests.conformance.checks import CHECKS, Check
from tests.conformance.lethal import LETHAL
from tests.conformance.subject import Subject
from tests.real.server import RealServer, ServeReal


def play(check: Check, url: str, folders: tuple[Path, Path]) -> None:
    """Run one check against the server at a URL."""

    async def life() -> None:
        with (
            closing(CheckpointSource(CheckpointFolder.open(folders[0]))) as first,
            closing(CheckpointSource(CheckpointFolder.open(folders[1]))) as second,
        ):
            transport = HttpTransport(url)
            try:
                await check(Subject(transport, lambda seed: (first, second)[seed]))
            finally:
                await transport.aclose()

    asyncio.run(life())


@pytest.mark.parametrize("check", CHECKS, ids=[item.__name__ for item in CHECKS])
def test_a_real_server_conforms(
    check: Check, real_server: RealServer, checkpoint_a: Path, checkpoint_b: Path
) -> None:
    """Every harmless check holds on a real server without the memory saver."""
    play(check, real_server.url, (checkpoint_a, checkpoint_b))


@pytest.mark.parametrize("check", CHECKS, ids=[item.__name__ for item in CHECKS])
def test_a_real_server_with_the_saver_conforms(
    check: Check, real_server_saver: RealServer, checkpoint_a: Path, checkpoint_b: Path
) -> None:
    """Every harmless check holds on a real server with the memory saver's stand-in."""
    play(check, real_server_saver.url, (checkpoint_a, checkpoint_b))


@pytest.mark.parametrize("check", LETHAL, ids=[item.__name__ for item in LETHAL])
def test_a_real_server_dies_as_the_checks_say(
    check: Check, serve: ServeReal, checkpoint_a: Path, checkpoint_b: Path
) -> None:
    """Every lethal check kills a real server, and the driver sees that it did."""
    server = serve(memory_saver=True)
    play(check, server.url, (checkpoint_a, checkpoint_b))
    assert server.wait_exit(30.0) != 0
