"""Controllers with a planner that is wrong on purpose, for lives that have to break a law."""

from collections.abc import Callable
from functools import partial

from refitfsm.check.changes import planner
from refitfsm.check.planted.catalogue import MISTAKES
from refitfsm.controller import Controller
from refitfsm.errors import ConfigError
from refitfsm.planner.playbook import PLAYBOOK


def controls_of(name: str) -> Callable[..., Controller]:
    """What makes the controller; the one that ships for an empty name.

    Raises:
        ConfigError: there is no mistake of that name.
    """
    if not name:
        return Controller
    mistake = next((mistake for mistake in MISTAKES if mistake.name == name), None)
    if mistake is None:
        names = "; ".join(sorted(mistake.name for mistake in MISTAKES))
        raise ConfigError(f"planted {name!r}: is no planner that is wrong on purpose; there are: {names}")
    plays = mistake.change(PLAYBOOK)
    return partial(Controller, planner=mistake.wrap(planner(plays)), book=plays.book)
