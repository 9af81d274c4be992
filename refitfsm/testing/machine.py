"""A rule-based state machine of Hypothesis that plays a planner's fleet: one rule for each fault and turn.

The rules are made from the kinds of commands and of faults; the laws are checked after each step. Hypothesis
shrinks what breaks one to few steps.
"""

from typing import TYPE_CHECKING

from refitfsm import policies
from refitfsm.check.moves import FAULTS, Move
from refitfsm.check.mutants.games import planned_game
from refitfsm.check.mutants.graph import Game
from refitfsm.check.worlds import worlds
from refitfsm.errors import ConfigError
from refitfsm.model.table import BOOK, Book
from refitfsm.model.values import CommandKind

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine
    from hypothesis.strategies import DataObject

OTHER = "turns"
"""All that is neither asked, nor a fault: answers, and cycles that open and end."""
LABELS: tuple[str, ...] = (
    *(f"asked {kind.value}" for kind in CommandKind),
    *(fault.name for fault in FAULTS),
    OTHER,
)
"""What rules are named by."""


class LawBroken(AssertionError):
    """A law does not hold; the message is the law."""


def label(move: Move) -> str:
    """The rule that makes a move."""
    if move.name.startswith("asked: "):
        asked = f"asked {move.name.removeprefix('asked: ')}"
        return asked if asked in LABELS else OTHER
    what = move.name.partition(": ")[2]
    return what if what in LABELS else OTHER


def fleet_game(policy: str | policies.NamedPolicy, servers: int, faults: int, *, sessions: bool) -> Game:
    """What can happen to a small fleet that the planner leads under a policy.

    Raises:
        ConfigError: there is no such policy, or no server to lead.
    """
    named = policies.load(policy) if isinstance(policy, str) else policy
    if servers < 1 or faults < 0:
        raise ConfigError(
            f"{servers} servers with {faults} faults: take at least one server, and no fewer faults than 0"
        )
    wanted = "sessions" if sessions else "no sessions"
    kind = next(each for each in worlds(named.rules) if each.name == wanted)
    return planned_game(named.name, kind, servers, faults)


def machine(
    policy: "str | policies.NamedPolicy", *, servers: int = 2, faults: int = 2, sessions: bool = True
) -> "type[RuleBasedStateMachine]":
    """A state machine that plays a small fleet under a policy; its `TestCase` is a test.

    Args:
        policy: the name of a shipped policy, the path of a policy file, or a policy.
        servers: how many the planner leads.
        faults: how many things may go wrong in one run.
        sessions: the servers want weight updates in a session, as SGLang does from 0.5.21 on.

    Raises:
        ConfigError: there is no such policy, or no server to lead.
        ImportError: Hypothesis is not installed.
    """
    return player(fleet_game(policy, servers, faults, sessions=sessions))


def player(game: Game, book: Book = BOOK) -> "type[RuleBasedStateMachine]":
    """A state machine that plays a game, by some rules. Steps raise `LawBroken` where a law does not hold.

    Raises:
        ImportError: Hypothesis is not installed.
    """
    from hypothesis import strategies as st  # noqa: PLC0415 - optional
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule  # noqa: PLC0415 - optional

    world = game.under(book)

    class Player(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.here = game.start
            self.offer()

        def offer(self) -> None:
            """Sort what can happen by the rules that make it."""
            why = game.broken(self.here, world)
            if why:
                raise LawBroken(why)
            self.offered: dict[str, list[Move]] = {}
            for move in game.moves(self.here, world):
                self.offered.setdefault(label(move), []).append(move)

        def make(self, move: Move) -> None:
            self.here, why = game.step(self.here, move, world)
            if why:
                raise LawBroken(f"{move.name}: {why}")
            self.offer()

    def add(name: str) -> None:
        def offered(self: Player) -> bool:
            return name in self.offered

        def play(self: Player, data: "DataObject") -> None:
            self.make(data.draw(st.sampled_from(self.offered[name]), label=name))

        play.__name__ = name.replace(" ", "_")
        setattr(Player, play.__name__, precondition(offered)(rule(data=st.data())(play)))

    for name in LABELS:
        add(name)
    return Player
