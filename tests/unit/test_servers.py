"""One spelling for one server, and no two servers on one GPU unless the policy says so."""

import pytest

from refitfsm.errors import ConfigError
from refitfsm.servers import ServerSpec, checked_specs, normal_url


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://localhost:30000/", "http://127.0.0.1:30000"),
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://Node1:30000", "http://node1:30000"),
        ("https://node1", "https://node1:443"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_urls_have_one_spelling(given: str, normal: str) -> None:
    """Spellings of one address become the same URL."""
    assert normal_url(given) == normal


@pytest.mark.parametrize(
    "given", ["", "ftp://a:1", "http://", "http://u:p@a:1", "http://a:1/v1", "http://a:x"]
)
def test_what_is_no_server_is_refused(given: str) -> None:
    """Text that names no server is an error."""
    with pytest.raises(ConfigError):
        normal_url(given)


def test_a_server_given_twice_is_refused() -> None:
    """Two spellings of one address are one server given twice."""
    with pytest.raises(ConfigError, match="given twice"):
        checked_specs(["http://localhost:1", "http://127.0.0.1:1/"], share_gpus=False)


def test_no_servers_is_refused() -> None:
    """A fleet has at least one server."""
    with pytest.raises(ConfigError, match="at least one"):
        checked_specs([], share_gpus=False)


def test_overlapping_gpus_are_refused_unless_shared() -> None:
    """Two servers on one GPU, however its UUID is spelled, need share_gpus."""
    specs = [ServerSpec("http://a:1", ("GPU-AB",)), ServerSpec("http://b:1", ("ab",))]
    with pytest.raises(ConfigError, match="share_gpus"):
        checked_specs(specs, share_gpus=False)
    assert len(checked_specs(specs, share_gpus=True)) == 2
