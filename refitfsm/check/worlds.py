"""The kinds of servers that a policy is checked with."""

from collections.abc import Iterator
from typing import NamedTuple

from refitfsm.check.moves import World
from refitfsm.model.rules import Rules
from refitfsm.model.states import Tag
from refitfsm.model.values import Capabilities

_ABLE = Capabilities(sglang_version="0.5.16", memory_saver=True, checksums=True, loader=True)
_SESSIONS = _ABLE._replace(sglang_version="0.5.23", sessions=True)
CHUNKS = 2
"""Of a push: the fewest that leave something half done."""


class Named(NamedTuple):
    """A world, and what is special about its servers."""

    name: str
    world: World


def worlds(rules: Rules) -> Iterator[Named]:
    """Servers without update sessions and with; also such as back up the weights that the policy releases."""
    yield Named("no sessions", World(rules, _ABLE, CHUNKS))
    yield Named("sessions", World(rules, _SESSIONS, CHUNKS))
    if Tag.WEIGHTS in rules.release_tags:
        yield Named("sessions, backup", World(rules, _SESSIONS._replace(weights_backup=True), CHUNKS))
