"""The games that mutants are played through: a server of which anything is asked, and a planner's fleet."""

from collections.abc import Iterator

from refitfsm import policies
from refitfsm.check import laws, moves
from refitfsm.check.changes import planner
from refitfsm.check.decisions import Unlawful, watched
from refitfsm.check.healing import never_heals
from refitfsm.check.moves import Move, State, World
from refitfsm.check.mutants import unplanned
from refitfsm.check.mutants.graph import Game
from refitfsm.check.search import Seen, start, step
from refitfsm.check.worlds import Named, worlds
from refitfsm.model.table import BOOK, Book
from refitfsm.planner.playbook import PLAYBOOK


def unplanned_game(kind: Named, faults: int) -> Game:
    """Anything is asked of one server."""

    def under(book: Book) -> World:
        return kind.world._replace(book=book)

    first = unplanned.begin(faults, kind.world)
    return Game(
        f"unplanned, {kind.name}, {kind.world.chunks} chunks",
        faults,
        first,
        unplanned.moves,
        unplanned.play,
        unplanned.JUDGES,
        under,
    )


def planned_game(policy: str, kind: Named, servers: int, faults: int) -> Game:
    """A planner leads a fleet."""

    def under(book: Book) -> World:
        decide = watched(planner(PLAYBOOK._replace(book=book)), steps_too=True)
        return kind.world._replace(decide=decide, book=book)

    name = f"{policy}, {kind.name}, {servers} servers"
    return Game(name, faults, start(servers, faults, under(BOOK)), moves.moves, _step, _JUDGES, under)


def _step(state: State, move: Move, world: World) -> tuple[State, str]:
    try:
        return step(state, move, world, Seen())
    except Unlawful as error:
        return state, str(error)


def _laws(state: State, _world: World) -> str:
    return laws.broken(state)


def _late(state: State, world: World) -> str:
    try:
        views = state.fleet.servers.values()
        late = (laws.moved_by_a_late_answer(view, state.fleet.facts, world.book) for view in views)
        return next(filter(None, late), "")
    except AssertionError as error:
        return f"every_event_has_an_answer: {error}"


def _heals(state: State, world: World) -> str:
    try:
        return never_heals(state, world) if state.fleet.cycle is None else ""
    except AssertionError as error:
        return f"every_event_has_an_answer: {error}"
    except Unlawful as error:
        return str(error)


_JUDGES = (_laws, _late, _heals)


def planned_games(servers: int, faults: int) -> Iterator[Game]:
    """The planner under each shipped policy, with each kind of servers."""
    for policy in policies.shipped():
        for kind in worlds(policies.load(policy).rules):
            yield planned_game(policy, kind, servers, faults)


def unplanned_games(faults: int, chunks: int) -> Iterator[Game]:
    """Servers of each kind, with models of so many chunks."""
    for kind in worlds(policies.load("colocated").rules):
        yield unplanned_game(kind._replace(world=kind.world._replace(chunks=chunks)), faults)


def owned_game() -> Game:
    """Somebody else has paused the server that is enrolled."""
    kind = next(worlds(policies.load("colocated").rules))
    game = unplanned_game(kind, 0)
    return game._replace(name=f"{game.name}, owned", start=unplanned.begin(0, kind.world, owned=True))


def plain_game(faults: int) -> Game:
    """Anything is asked of one server without the memory saver."""
    kind = next(worlds(policies.load("colocated").rules))
    able = kind.world.able._replace(memory_saver=False)
    return unplanned_game(Named("no memory saver", kind.world._replace(able=able)), faults)
