"""Real SGLang servers for tests. What they need is installed on first use (see `environment.py`)."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from refitfsm.weights.files import tiny_checkpoint
from tests.real import server
from tests.real.environment import ensure
from tests.real.server import Greedy, RealServer, ServeReal

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 1800  # the first test to run may build the environment; no test waits without its own deadline


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is marked, and those with servers run on one worker: two fill two cores."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real)
            alone = "test_all_hold_with_torch" in item.name and "on_a_server" not in item.name
            item.add_marker(pytest.mark.xdist_group("torch" if alone else "real"))
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def real_python() -> Path:
    """The interpreter of the environment that holds SGLang."""
    return ensure()


@pytest.fixture(scope="session")
def checkpoint_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that every server starts with."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint-a"), seed=0)


@pytest.fixture(scope="session")
def checkpoint_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the same model."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint-b"), seed=1)


@pytest.fixture(scope="module")
def real_server(real_python: Path, checkpoint_a: Path) -> Iterator[RealServer]:
    """A server without memory saver, one for all tests of a module: leave it serving checkpoint A."""
    with RealServer(real_python, checkpoint_a) as running:
        yield running


@pytest.fixture(scope="module")
def real_server_saver(real_python: Path, checkpoint_a: Path) -> Iterator[RealServer]:
    """A server with the memory saver's stand-in, likewise."""
    with RealServer(real_python, checkpoint_a, memory_saver=True) as running:
        yield running


@pytest.fixture
def serve(real_python: Path, checkpoint_a: Path) -> Iterator[ServeReal]:
    """Starts a server of the test's own, on checkpoint A, for what may kill it."""
    with ExitStack() as stack:

        def start(**options: Any) -> RealServer:
            return stack.enter_context(RealServer(real_python, checkpoint_a, **options))

        yield start


@pytest.fixture(scope="session")
def greedy() -> Greedy:
    """`greedy(url, input_ids, n)`: the `n` most likely tokens that follow."""
    return server.greedy
