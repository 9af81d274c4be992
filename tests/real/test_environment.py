"""The environment's builder, shown on an environment of one small package."""

import threading
from pathlib import Path

import pytest

from tests.real import environment


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is reported, with the builder set to the small package and a cache of the test's own."""
    pinned = tmp_path / "requirements.txt"
    pinned.write_text("# small, and pure Python\nsix==1.17.0\n")
    monkeypatch.setattr(environment, "REQUIREMENTS", pinned)
    monkeypatch.setattr(environment, "_CHECK_BUILD", environment._CHECK)
    monkeypatch.setenv("REFITFSM_CACHE", str(tmp_path / "cache"))
    return []


def test_an_environment_is_built_once_and_again_when_it_breaks(reports: list[str]) -> None:
    """Of two runs one builds; a package or a marker that is gone makes the next run build anew."""
    other: list[str] = []
    beside = threading.Thread(target=environment.ensure, args=(other.append,))
    beside.start()
    python = environment.ensure(reports.append)
    beside.join()
    assert python.is_file()
    assert sum("built in" in line for line in reports + other) == 1

    def builds() -> int:
        reports.clear()
        assert environment.ensure(reports.append) == python
        return sum("built in" in line for line in reports)

    assert builds() == 0
    next(python.parents[1].glob("lib/*/site-packages/six-*")).rename(python.parents[2] / "taken")
    assert builds() == 1
    (python.parents[2] / "complete").unlink()
    assert builds() == 1
    assert builds() == 0


def test_a_package_that_does_not_exist_is_named(reports: list[str]) -> None:
    """A failed installation ends with the installer's own words, and leaves nothing that counts as built."""
    environment.REQUIREMENTS.write_text("six==0.0.0.dev999\n")
    with pytest.raises(environment.BuildError, match=r"six==0\.0\.0\.dev999"):
        environment.ensure(reports.append)
    assert not (environment.folder() / "complete").exists()


def test_the_cache_is_where_the_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's own variable comes before the general one, and that before the home folder."""
    monkeypatch.setenv("REFITFSM_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "general"))
    assert environment.cache_root() == tmp_path / "own"
    monkeypatch.delenv("REFITFSM_CACHE")
    assert environment.cache_root() == tmp_path / "general" / "refitfsm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert environment.cache_root() == tmp_path / "home" / ".cache" / "refitfsm"
