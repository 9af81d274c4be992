"""The same game under many rules: what a changed cell of the table does not touch is worked out once.

A graph holds states as nodes, and what each move leads to under the rules that ship, with the cells of the
table that were looked at on the way. A mutant differs in one cell. So its search, or its walk, takes over
every move that did not look there, and makes the others anew. Nothing is approximated by that: it finds what
a search of its own would find.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from refitfsm.check.moves import Move, State, World
from refitfsm.check.normal import Key, Normaliser
from refitfsm.model.table import Book, Cell
from refitfsm.model.table import Key as CellKey

Cells = frozenset[CellKey]
STEPS_MAX = 60
"""Of one walk."""


class Game(NamedTuple):
    """What can be played: who starts, what may happen, what comes of it, and what is against the laws."""

    name: str
    faults: int
    start: State
    moves: Callable[[State, World], Iterator[Move]]
    step: Callable[[State, Move, World], tuple[State, str]]
    """The state after, and the law that is broken on the way there."""
    broken: Callable[[State, World], str]
    """The law that a state breaks."""
    under: Callable[[Book], World]
    """The game's world under some rules."""


class Edge(NamedTuple):
    """A move under the rules that ship."""

    move: Move
    used: Cells
    target: "Node"
    why: str


class Node:
    """A state, and what is known of it so far."""

    __slots__ = ("_edges", "_graph", "_judged", "_moving", "state")

    def __init__(self, graph: "Graph", state: State) -> None:
        self.state = state
        self._graph = graph
        self._edges: tuple[Edge, ...] | None = None
        self._moving: tuple[Edge, ...] = ()
        self._judged: tuple[str, Cells] | None = None

    def edges(self) -> tuple[Edge, ...]:
        """Every move."""
        if self._edges is None:
            self._edges = tuple(self._graph.edges_of(self))
            self._moving = tuple(each for each in self._edges if each.target is not self or each.why)
        return self._edges

    def moving(self) -> tuple[Edge, ...]:
        """Moves that lead to another state, or break a law."""
        self.edges()
        return self._moving

    def judged(self) -> tuple[str, Cells]:
        """The law that it breaks, and the cells that say so."""
        if self._judged is None:
            self._judged = self._graph.judge(self.state)
        return self._judged


class Rule(NamedTuple):
    """The rules with one cell changed."""

    key: CellKey
    book: Book


class Found(NamedTuple):
    """A law that a mutant breaks, and after how many moves."""

    law: str
    moves: int


class _Noted(Mapping[CellKey, Cell]):
    """Cells that remember which of them were looked at."""

    def __init__(self, cells: Mapping[CellKey, Cell]) -> None:
        self._cells = cells
        self.seen: set[CellKey] = set()

    def __getitem__(self, key: CellKey) -> Cell:
        self.seen.add(key)
        return self._cells[key]

    def __iter__(self) -> Iterator[CellKey]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class Graph:
    """All that is known of one game."""

    def __init__(self, game: Game, book: Book) -> None:
        self.game = game
        self._noted = _Noted(book.cells)
        self._world = game.under(book._replace(cells=self._noted))
        self._normal = Normaliser()
        self._nodes: dict[Key, Node] = {}
        self._sets: dict[Cells, Cells] = {}
        self.first = self.node(game.start)

    def node(self, state: State) -> Node:
        """The node of a state."""
        after, key = self._normal(state)
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = Node(self, after)
        return found

    def edges_of(self, node: Node) -> Iterator[Edge]:
        """Every move under the rules that ship."""
        for move in self.game.moves(node.state, self._world):
            self._noted.seen.clear()
            after, why = self.game.step(node.state, move, self._world)
            used = self._seen()
            yield Edge(move, used, node if why else self.node(after), why)

    def judge(self, state: State) -> tuple[str, Cells]:
        """The law that a state breaks under the rules that ship, and the cells that say so."""
        self._noted.seen.clear()
        why = self.game.broken(state, self._world)
        return why, self._seen()

    def _seen(self) -> Cells:
        seen = frozenset(self._noted.seen)
        return self._sets.setdefault(seen, seen)

    def after(self, node: Node, edge: Edge, rule: Rule, world: World) -> tuple[Node, str]:
        """Where a move leads under changed rules, and the law that is broken on the way."""
        if rule.key not in edge.used:
            return edge.target, edge.why
        after, why = self.game.step(node.state, edge.move, world)
        return (node, why) if why else (self.node(after), "")

    def broken(self, node: Node, rule: Rule, world: World) -> str:
        """The law that a state breaks under changed rules."""
        why, used = node.judged()
        return self.game.broken(node.state, world) if rule.key in used else why


class Searched(NamedTuple):
    """What a search under changed rules has found."""

    found: Found | None
    states: int
    differs: bool
    """Something that can happen leads elsewhere than under the rules that ship."""
    complete: bool
    """Every state was reached."""


def search(graph: Graph, rule: Rule, *, states_max: int = 50_000) -> Searched:
    """Breadth first through all states under changed rules, to the first law that is broken."""
    world = graph.game.under(rule.book)
    known, differs = {graph.first}, False
    queue = deque([(graph.first, 0)])
    why = graph.broken(graph.first, rule, world)
    if why:
        return Searched(Found(why, 0), 1, True, False)
    while queue and len(known) < states_max:
        node, depth = queue.popleft()
        for edge in _edges(node, rule):
            after, why = graph.after(node, edge, rule, world)
            differs = differs or (after, why) != (edge.target, edge.why)
            if not why:
                if after in known:
                    continue
                known.add(after)
                queue.append((after, depth + 1))
                why = graph.broken(after, rule, world)
            if why:
                return Searched(Found(why, depth + 1), len(known), True, False)
    return Searched(None, len(known), differs, not queue)


def _edges(node: Node, rule: Rule) -> Iterator[Edge]:
    """Moves that change something, and those that do under other rules, or may."""
    moving = node.moving()
    yield from moving
    if len(moving) < len(node.edges()):
        for edge in node.edges():
            if edge.target is node and not edge.why and rule.key in edge.used:
                yield edge


def walk(graph: Graph, rule: Rule, dice: random.Random) -> tuple[Found | None, int]:
    """At random through the game under changed rules: the law that is broken, and how many steps it took."""
    world = graph.game.under(rule.book)
    node = graph.first
    for number in range(STEPS_MAX):
        why = graph.broken(node, rule, world)
        if why:
            return Found(why, number), number
        choices = tuple(_edges(node, rule))
        if not choices:
            return None, number
        edge = dice.choice(choices)
        node, why = graph.after(node, edge, rule, world)
        if why:
            return Found(why, number + 1), number + 1
    return None, STEPS_MAX
