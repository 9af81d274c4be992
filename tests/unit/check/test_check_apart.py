"""The search that takes servers apart, against one that does not."""

from collections import deque

import pytest

from refitfsm import policies
from refitfsm.check.apart import apart
from refitfsm.check.joint import Centre, Flags, Planner, centre_of, flags_of
from refitfsm.check.modular import Modular
from refitfsm.check.moves import State, World, moves
from refitfsm.check.planted.catalogue import MISTAKES
from refitfsm.check.planted.mistake import Mistake, wrong_world
from refitfsm.check.search import Result, start, step
from refitfsm.check.truth import TrueServer
from refitfsm.check.worlds import worlds
from refitfsm.model.values import ServerView

Seat = tuple[Flags, ServerView, TrueServer]
Coded = tuple[Centre, tuple[Seat, ...]]


def coded(state: State, world: World) -> Coded:
    """A state in the codes of its centre, servers in a standing order."""
    centre, codes = centre_of(state.fleet, state.serving, world.rules.attempts)
    seats = [
        (flags_of(state.fleet.cycle, name), codes.view(view), codes.true(true, view))
        for (name, view), true in zip(state.fleet.servers.items(), state.truth, strict=True)
    ]
    return centre, tuple(sorted(seats, key=lambda seat: (seat[0], repr(seat[1:]))))


def explicit(servers: int, faults: int, world: World) -> set[tuple[Coded, int]]:
    """Every state of the whole fleet, with the number of faults that led there."""
    first = start(servers, faults, world)
    known = {(coded(first, world), 0)}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        for move in moves(state, world):
            after, why = step(state, move, world, Result())
            assert not why
            key = coded(after, world), faults - after.faults
            if key not in known:
                known.add(key)
                queue.append(after)
    return known


def world_of(policy: str, number: int) -> World:
    return list(worlds(policies.load(policy).rules))[number].world


@pytest.mark.parametrize(
    ("policy", "number", "servers", "faults"),
    [("colocated", 0, 2, 0), ("colocated", 1, 1, 1), ("always_on", 1, 1, 1), ("kv_only", 0, 1, 1)],
)
def test_whatever_a_fleet_can_be_is_found_with_servers_apart(
    policy: str, number: int, servers: int, faults: int
) -> None:
    """Law: no state of the whole fleet is missed, nor thought to need more faults than it does."""
    world = world_of(policy, number)
    search = Modular(servers, faults, Planner(world))
    search.run()
    for (centre, seats), paid in explicit(servers, faults, world):
        here = search.situations[centre, tuple(sorted(flags for flags, _, _ in seats))]
        for flags, view, true in seats:
            server = search.views.index(view), search.trues.index(true)
            assert here.servers[flags][server] <= paid


def test_with_no_faults_nothing_is_found_that_cannot_be() -> None:
    """Law: where nothing excludes anything, what is found apart is exactly what a whole fleet can be."""
    world = world_of("colocated", 0)
    search = Modular(2, 0, Planner(world))
    search.run()
    whole = {
        (centre, tuple(sorted(flags for flags, _, _ in seats)), seat)
        for (centre, seats), _ in explicit(2, 0, world)
        for seat in seats
    }
    assert search.states == len(whole)


NOT_OF_A_STATE = {
    "takes a 200 for proof",
    "does not compare",
    "ends a session before the last chunk",
    "forgets to go on",
    "asks the dead",
    "asks the dead without end",
    "takes one server's answer for another's",
    "speaks to a new server as to an old one",
}
"""Mistakes that show in a decision, in a lie, or in what never comes: the full search finds them."""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planner_that_breaks_a_law_of_states_is_found_with_servers_apart(mistake: Mistake) -> None:
    """Law: whichever planted planner leads a server where a law of states does not hold is found."""
    found = apart(mistake.bounds.servers, mistake.bounds.faults, wrong_world(mistake))
    assert not found.entangled
    assert bool(found.broken) == (mistake.name not in NOT_OF_A_STATE)
