"""The games that mutants are played through: a server of which anything is asked, and a planner's fleet."""

from collections.abc import Iterator

from refitfsm import policies
from refitfsm.check import laws, moves
from refitfsm.check.changes import planner
from refitfsm.check.decisions import Unlawful, watched
from refitfsm.check.healing import never_heals
from refitfsm.check.moves import Move, State, World
from refitfsm.check.mutants import free
from refitfsm.check.mutants.graph import Game
from refitfsm.check.search import Result, start, step
from refitfsm.check.worlds import Named, worlds
from refitfsm.model.table import BOOK, Book
from refitfsm.planner.playbook import PLAYBOOK


def free_game(kind: Named, faults: int) -> Game:
    """Anything is asked of one server."""

    def under(book: Book) -> World:
        return kind.world._replace(book=book)

    first = free.begin(faults, kind.world)
    return Game(f"free, {kind.name}", faults, first, free.moves, free.play, free.broken, under)


def planned_game(policy: str, kind: Named, servers: int, faults: int) -> Game:
    """A planner leads a fleet."""

    def under(book: Book) -> World:
        decide = watched(planner(PLAYBOOK._replace(book=book)))
        return kind.world._replace(decide=decide, book=book)

    name = f"{policy}, {kind.name}, {servers} servers"
    return Game(name, faults, start(servers, faults, under(BOOK)), moves.moves, _step, _broken, under)


def _step(state: State, move: Move, world: World) -> tuple[State, str]:
    try:
        return step(state, move, world, Result())
    except Unlawful as error:
        return state, str(error)


def _broken(state: State, world: World) -> str:
    try:
        for view in state.fleet.servers.values():
            why = laws.moved_by_a_late_answer(view, state.fleet.facts, world.book)
            if why:
                return why
        return laws.broken(state) or (never_heals(state, world) if state.fleet.cycle is None else "")
    except AssertionError as error:
        return f"every_event_has_an_answer: {error}"
    except Unlawful as error:
        return str(error)


def planned_games(servers: int, faults: int) -> Iterator[Game]:
    """The planner under each shipped policy, with each kind of servers."""
    for policy in policies.shipped():
        for kind in worlds(policies.load(policy).rules):
            yield planned_game(policy, kind, servers, faults)


def free_games(faults: int) -> Iterator[Game]:
    """Servers of each kind; one without the memory saver, too."""
    kinds = tuple(worlds(policies.load("colocated").rules))
    for kind in kinds:
        yield free_game(kind, faults)
    world = kinds[0].world
    plain = world._replace(able=world.able._replace(memory_saver=False))
    yield free_game(Named("no memory saver", plain), faults)
