"""The search that takes servers apart, against one that does not."""

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitfsm import policies
from refitfsm.check.apart import apart
from refitfsm.check.components import components
from refitfsm.check.joint import Centre, Flags, Planner, centre_of, flags_of
from refitfsm.check.loops import Node, calm_steps
from refitfsm.check.modular import Modular
from refitfsm.check.moves import State, World, moves
from refitfsm.check.planted.catalogue import MISTAKES
from refitfsm.check.planted.mistake import Mistake, wrong_world
from refitfsm.check.search import Seen, start, step
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
    """Every state of the whole fleet in codes, with the number of faults that led there."""
    return {(coded(state, world), faults - state.faults) for state in reached(servers, faults, world)}


def reached(servers: int, faults: int, world: World) -> Iterator[State]:
    """Every state of the whole fleet; one of those that are the same in codes."""
    first = start(servers, faults, world)
    known = {(coded(first, world), 0)}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        yield state
        for move in moves(state, world):
            after, why = step(state, move, world, Seen())
            assert not why
            key = coded(after, world), faults - after.faults
            if key not in known:
                known.add(key)
                queue.append(after)


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


@pytest.mark.parametrize(("number", "servers", "faults"), [(0, 2, 0), (1, 1, 1)])
def test_whatever_a_fleet_does_without_faults_is_a_calm_step_of_each_server(
    number: int, servers: int, faults: int
) -> None:
    """Law: no step that could be one of a loop is missed: each server takes it, or is left as it was."""
    world = world_of("colocated", number)
    search = Modular(servers, faults, Planner(world))
    search.run()

    views = {view: number for number, view in enumerate(search.views)}
    trues = {true: number for number, true in enumerate(search.trues)}

    def nodes(state: State) -> list[Node]:
        centre, codes = centre_of(state.fleet, state.serving, world.rules.attempts)
        flags = [flags_of(state.fleet.cycle, name) for name in state.fleet.servers]
        here = search.situations[centre, tuple(sorted(flags))]
        servers = zip(flags, state.fleet.servers.values(), state.truth, strict=True)
        return [
            Node(here, each, (views[codes.view(view)], trues[codes.true(true, view)]))
            for each, view, true in servers
        ]

    def is_near(to: Node, node: Node) -> bool:
        """The last answer and the turn that it leads to are two steps."""
        once = {each.to for each in calm_steps(search, node)}
        return to in {node, *once} or any(to in {each.to for each in calm_steps(search, one)} for one in once)

    looked_at = 0
    for state in reached(servers, faults, world):
        for move in moves(state, world):
            if move.is_fault or (move.name.startswith("asked: ") and move.name != "asked: refit"):
                continue
            after, _ = step(state, move, world, Seen())
            for node, to in zip(nodes(state), nodes(after), strict=True):
                assert is_near(to, node), move.name
                looked_at += 1
    assert looked_at > 100


@given(st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=8, max_size=8))
def test_two_are_in_one_component_if_each_leads_to_the_other(edges: list[list[int]]) -> None:
    """Law: components are what can be reached and comes back."""
    reach = [set(ahead) | {node} for node, ahead in enumerate(edges)]
    for _ in edges:
        reach = [set().union(*(reach[to] for to in ahead)) for ahead in reach]
    found = components(edges)
    for one in range(8):
        for other in range(8):
            assert (found[one] == found[other]) == (other in reach[one] and one in reach[other])


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
    "takes one server's answer for another's",
}
"""Mistakes that show in a decision or in a lie: the full search finds them."""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planner_that_breaks_a_law_of_states_is_found_with_servers_apart(mistake: Mistake) -> None:
    """Law: whichever planted planner leads a server where a law of states does not hold is found."""
    found = apart(mistake.bounds.servers, mistake.bounds.faults, wrong_world(mistake))
    assert not found.entangled
    assert bool(found.broken) == (mistake.name not in NOT_OF_A_STATE)
