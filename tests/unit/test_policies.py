"""Policies are data: validated, and refused with the key and the remedy."""

from pathlib import Path

import pytest

from refitfsm import policies
from refitfsm.errors import ConfigError
from refitfsm.model.states import Tag
from refitfsm.model.values import CommandKind


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", policies.shipped())
def test_every_shipped_policy_loads(name: str) -> None:
    """A shipped policy is valid and has a deadline for every kind of command."""
    rules = policies.load(name).rules
    assert {kind for kind, _ in rules.deadlines_s} == set(CommandKind)
    assert all(deadline_s > 0 for _, deadline_s in rules.deadlines_s)


def test_the_policies_that_are_promised_are_shipped() -> None:
    """colocated, always_on and kv_only are there, and release what their names say."""
    released = {name: policies.load(name).rules.release_tags for name in policies.shipped()}
    assert released["colocated"] == frozenset(Tag)
    assert released["always_on"] == frozenset()
    assert released["kv_only"] == {Tag.KV_CACHE}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('description = "x"\nrelase = []', "relase"),
        ('description = "x"\nrelease = ["weight"]', "weight"),
        ('description = "x"\nattempts = 0', "attempts"),
        ('description = "x"\n[deadlines_s]\nfluch = 3', "fluch"),
        ('description = "x"\ndrain_budget_s = 70', "drain_budget_s"),
        ("release = []", "description"),
        ("release = [", "cannot be read"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    """An unknown key or a wrong value is an error that names the file and the key."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as caught:
        policies.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    """A policy that does not exist is an error that names those that do."""
    with pytest.raises(ConfigError, match="always_on, colocated, kv_only"):
        policies.load("colocted")
    with pytest.raises(ConfigError, match="there is none"):
        policies.load(tmp_path / "nothing.toml")


def test_a_policy_of_ones_own_is_loaded_by_path(tmp_path: Path) -> None:
    """A file that sets little takes the defaults for the rest."""
    mine = policies.load(written(tmp_path, 'description = "mine"\nrelease = ["kv_cache"]\nfloor = 2'))
    assert mine.name == "mine"
    assert mine.rules.floor == 2
    assert mine.rules.deadline_s(CommandKind.CONTINUE) == 30.0
