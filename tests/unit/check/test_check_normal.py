"""States that differ in nothing that matters are one state, and others are not."""

import pytest

from refitfsm import policies
from refitfsm.check.moves import Move, State, World, moves
from refitfsm.check.normal import Normaliser
from refitfsm.check.search import Seen, start, step
from refitfsm.check.worlds import worlds


@pytest.fixture
def world() -> World:
    return next(iter(worlds(policies.load("colocated").rules))).world


def states(world: World, servers: int, faults: int, count: int) -> list[State]:
    """The first states of a search, as moves leave them."""
    found = [start(servers, faults, world)]
    for state in found:
        if len(found) > count:
            break
        for move in moves(state, world):
            after, why = step(state, move, world, Seen())
            assert not why
            found.append(after)
    return found


def mirrored(state: State) -> State:
    """The same with its two servers in each other's place."""
    fleet, cycle = state.fleet, state.fleet.cycle
    first, second = fleet.servers
    other = {first: second, second: first}
    servers = {name: fleet.servers[other[name]]._replace(server=name) for name in fleet.servers}
    if cycle is not None:
        cycle = cycle._replace(
            members=frozenset(other[name] for name in cycle.members),
            failed=tuple((other[name], why) for name, why in cycle.failed),
            given_up=frozenset(other[name] for name in cycle.given_up),
        )
    return state._replace(fleet=fleet._replace(servers=servers, cycle=cycle), truth=state.truth[::-1])


def test_servers_are_interchangeable(world: World) -> None:
    """Which server it is does not matter."""
    normal = Normaliser()
    for state in states(world, 2, 1, 400):
        assert normal(state)[1] == normal(mirrored(state))[1]


def test_a_normal_state_stands_for_itself(world: World) -> None:
    """What was brought into its form keeps it."""
    normal = Normaliser()
    for state in states(world, 2, 1, 400):
        once, key = normal(state)
        again, same = normal(once)
        assert (again, same) == (once, key)


def test_what_happens_next_does_not_depend_on_the_form(world: World) -> None:
    """A state and its normal form have the same moves, to the same states."""
    normal = Normaliser()

    def successors(state: State) -> set[object]:
        def made(move: Move) -> object:
            after, why = step(state, move, world, Seen())
            return move.name, why or normal(after)[1]

        return {made(move) for move in moves(state, world)}

    for state in states(world, 2, 1, 150):
        assert successors(state) == successors(normal(state)[0])


def test_faults_that_are_left_make_a_difference(world: World) -> None:
    """A state with fewer faults to come is another."""
    normal = Normaliser()
    assert normal(start(1, 1, world))[1] != normal(start(1, 0, world))[1]
