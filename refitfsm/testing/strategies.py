"""Strategies of Hypothesis for tests of your own: policies, commands, servers, events, faults, fleets.

What they make is what the package itself takes: values that do not change. They shrink to what is quiet,
whole and healthy.
"""

from functools import cache

from hypothesis import strategies as st

from refitfsm import policies as _policies
from refitfsm.check.mutants import beliefs
from refitfsm.model import laws
from refitfsm.model.fleet import FleetView
from refitfsm.model.states import ServerState
from refitfsm.model.table import BOOK
from refitfsm.model.values import Command, CommandKind, Event, EventName, Facts, ServerView
from refitfsm.policies import NamedPolicy
from refitfsm.sim.faults import Kind
from refitfsm.testing.machine import fleet_game

FACTS: Facts = beliefs.FACTS
"""What is so of the fleet around what `servers` and `steps` make: it serves version 3 and refits."""
_RIGHT_OFTEN = 9
"""So many times as often as it goes wrong, as far as more may go wrong."""
PATHS = (
    "/flush_cache",
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/model_info",
)
"""The calls of a refit that `faults` befall."""


def policies() -> st.SearchStrategy[NamedPolicy]:
    """The shipped policies."""
    return st.sampled_from(_policies.shipped()).map(_policies.load)


def commands(kind: CommandKind | None = None) -> st.SearchStrategy[Command]:
    """Commands of a kind, or of any: with all tags, versions and chunks that are worth telling apart."""
    kinds = tuple(CommandKind) if kind is None else (kind,)
    return st.sampled_from([command for each in kinds for command in beliefs.commands(each)])


def servers(state: ServerState | None = None) -> st.SearchStrategy[ServerView]:
    """What may be believed of a server in a state, or in any, with nothing in flight. It keeps every law."""
    states = tuple(ServerState) if state is None else (state,)
    return st.sampled_from([view for each in states for view in _lawful(each)])


@cache
def _lawful(state: ServerState) -> tuple[ServerView, ...]:
    views = beliefs.beliefs(state)
    return tuple(view for view in views if laws.broken((view,), FACTS) is None)


def steps(
    state: ServerState | None = None, event: EventName | None = None
) -> st.SearchStrategy[tuple[ServerView, Event]]:
    """A server, and something that happens to it: a request that may be refused, an answer, an end."""
    cells = [key for key in BOOK.cells if state in (None, key[0]) and event in (None, key[1])]
    return st.sampled_from(cells).flatmap(lambda key: st.sampled_from(_cases(key)))


@cache
def _cases(key: tuple[ServerState, EventName]) -> tuple[tuple[ServerView, Event], ...]:
    return tuple((case.view, case.event) for case in beliefs.cases(key))


@st.composite
def faults(draw: st.DrawFn) -> str:
    """A fault of a simulated server, in the words that `refitfsm sim-server --fault` takes."""
    kind = draw(st.sampled_from(Kind))
    argument = ""
    if kind in (Kind.DELAY, Kind.SLOW):
        argument = f"={draw(st.integers(1, 5))}"
    elif kind in (Kind.STATUS_BEFORE, Kind.STATUS_AFTER):
        argument = f"={draw(st.sampled_from((400, 500, 502)))}"
    path = draw(st.sampled_from(PATHS))
    return f"{kind}{argument}@{path}:{draw(st.integers(1, 3))}"


@st.composite
def fleets(
    draw: st.DrawFn,
    policy: str | NamedPolicy = "colocated",
    *,
    servers: int = 2,
    faults: int = 1,
    moves_max: int = 30,
) -> FleetView:
    """A fleet as it is believed to be after so many things have happened, under the shipped planner.

    Args:
        policy: the name of a shipped policy, the path of a policy file, or a policy.
        servers: how many the planner leads.
        faults: how many things may have gone wrong.
        moves_max: how many things may have happened.

    Raises:
        ConfigError: there is no such policy, or no server to lead.
    """
    game = fleet_game(policy, servers, faults, sessions=True)
    state, world = game.start, game.under(BOOK)
    for _ in range(draw(st.integers(0, moves_max))):
        moves = tuple(game.moves(state, world))
        wrong = tuple(move for move in moves if move.is_fault)
        right = tuple(move for move in moves if not move.is_fault)
        some = wrong if wrong and (not right or draw(st.integers(0, _RIGHT_OFTEN)) == _RIGHT_OFTEN) else right
        if not some:
            break
        state, _ = game.step(state, some[draw(st.integers(0, len(some) - 1))], world)
    return state.fleet
