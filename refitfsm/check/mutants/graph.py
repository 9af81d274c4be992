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
Lead = tuple["Node", str]
"""Where a move leads, and the law that is broken on the way."""
STEPS_MAX = 60
"""Of one walk."""
SPARE = 2_000
"""States that a search may reach beyond those of the rules that ship, before it gives up."""


class Game(NamedTuple):
    """What can be played: who starts, what may happen, what comes of it, and what is against the laws."""

    name: str
    faults: int
    start: State
    moves: Callable[[State, World], Iterator[Move]]
    step: Callable[[State, Move, World], tuple[State, str]]
    """The state after, and the law that is broken on the way there."""
    judges: tuple[Callable[[State, World], str], ...]
    """Each says which law a state breaks. Apart, since most need not look at the table."""
    under: Callable[[Book], World]
    """The game's world under some rules."""

    def broken(self, state: State, world: World) -> str:
        """The first law that a state breaks; empty if none."""
        return next(filter(None, (judge(state, world) for judge in self.judges)), "")


class Edge(NamedTuple):
    """A move under the rules that ship."""

    move: Move
    used: Cells
    target: "Node"
    why: str


class Judged(NamedTuple):
    """The law that a state breaks, as one judge says, and the cells that say so."""

    why: str
    used: Cells


class Node:
    """A state, and what is known of it so far under the rules that ship."""

    __slots__ = ("_cells", "_edges", "_graph", "_judged", "_leads", "state")

    def __init__(self, graph: "Graph", state: State) -> None:
        self.state = state
        self._graph = graph
        self._edges: tuple[Edge, ...] | None = None
        self._cells: Cells = frozenset()
        self._leads: tuple[Lead, ...] = ()
        self._judged: tuple[Judged, ...] | None = None

    def edges(self) -> tuple[Edge, ...]:
        """Every move."""
        if self._edges is None:
            self._edges = tuple(self._graph.edges_of(self))
            self._cells = self._graph.union(each.used for each in self._edges)
            leads = ((each.target, each.why) for each in self._edges)
            self._leads = tuple(dict.fromkeys(lead for lead in leads if lead != (self, "")))
        return self._edges

    def cells(self) -> Cells:
        """All that its moves look at."""
        self.edges()
        return self._cells

    def leads(self) -> tuple[Lead, ...]:
        """Where its moves lead, each once, without those that lead back to it."""
        self.edges()
        return self._leads

    def judged(self) -> tuple[Judged, ...]:
        """What each judge says of it."""
        if self._judged is None:
            self._judged = tuple(self._graph.judged(self.state))
        return self._judged


class Rule(NamedTuple):
    """The rules with one cell changed."""

    key: CellKey
    book: Book


class Found(NamedTuple):
    """A law that a mutant breaks, and after how many moves."""

    law: str
    moves: int


class Unsound(AssertionError):
    """The rules that ship break a law: nothing is learned from mutants."""


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


class Sound(NamedTuple):
    """All states under the rules that ship."""

    states: int
    asking: Mapping[CellKey, tuple[Node, ...]]
    """By cell, breadth first: the nodes whose moves or judges look at it."""


class Graph:
    """All that is known of one game."""

    def __init__(self, game: Game, book: Book) -> None:
        self.game = game
        self._noted = _Noted(book.cells)
        self._world = game.under(book._replace(cells=self._noted))
        self._normal = Normaliser()
        self._nodes: dict[Key, Node] = {}
        self._sets: dict[Cells, Cells] = {}
        self._sound: Sound | None = None
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
            used = self._shared(frozenset(self._noted.seen))
            stays = why or after is node.state
            yield Edge(move, used, node if stays else self.node(after), why)

    def judged(self, state: State) -> Iterator[Judged]:
        """What each judge says of a state under the rules that ship."""
        for judge in self.game.judges:
            self._noted.seen.clear()
            why = judge(state, self._world)
            yield Judged(why, self._shared(frozenset(self._noted.seen)))

    def union(self, used: Iterator[Cells]) -> Cells:
        """All of these cells."""
        return self._shared(frozenset[CellKey]().union(*used))

    def _shared(self, cells: Cells) -> Cells:
        return self._sets.setdefault(cells, cells)

    def sound(self) -> Sound:
        """All states under the rules that ship.

        Raises:
            Unsound: one of them breaks a law.
        """
        if self._sound is None:
            known = {self.first: None}
            queue = deque(known)
            asking: dict[CellKey, list[Node]] = {}
            while queue:
                node = queue.popleft()
                for why in (*(each.why for each in node.judged()), *(why for _, why in node.leads())):
                    if why:
                        raise Unsound(f"{self.game.name}: {why}")
                for cell in self.union(each for each in (node.cells(), *(j.used for j in node.judged()))):
                    asking.setdefault(cell, []).append(node)
                new = [target for target, _ in node.leads() if target not in known]
                known.update(dict.fromkeys(new))
                queue.extend(new)
            self._sound = Sound(len(known), {cell: tuple(nodes) for cell, nodes in asking.items()})
        return self._sound


class _Changed:
    """A graph under changed rules."""

    def __init__(self, graph: Graph, rule: Rule) -> None:
        self._graph = graph
        self._key = rule.key
        self._world = graph.game.under(rule.book)
        self._leads: dict[Node, tuple[Lead, ...]] = {}

    def lead(self, node: Node, edge: Edge) -> Lead:
        """Where a move leads, and the law that is broken on the way."""
        if self._key not in edge.used:
            return edge.target, edge.why
        after, why = self._graph.game.step(node.state, edge.move, self._world)
        return (node, why) if why or after is node.state else (self._graph.node(after), "")

    def leads(self, node: Node) -> tuple[Lead, ...]:
        """Where all moves lead, each once, without those that lead back to it."""
        if self._key not in node.cells():
            return node.leads()
        found = self._leads.get(node)
        if found is None:
            all_ = dict.fromkeys(self.lead(node, edge) for edge in node.edges())
            found = self._leads[node] = tuple(lead for lead in all_ if lead != (node, ""))
        return found

    def broken(self, node: Node) -> str:
        """The law that a state breaks."""
        for judge, said in zip(self._graph.game.judges, node.judged(), strict=True):
            why = judge(node.state, self._world) if self._key in said.used else said.why
            if why:
                return why
        return ""

    def differs(self, node: Node) -> bool:
        """Whether anything that can happen in a sound state leads elsewhere, or is judged otherwise."""
        moved = any(self.lead(node, each) != (each.target, each.why) for each in node.edges())
        return moved or bool(self.broken(node))


class Searched(NamedTuple):
    """What a search under changed rules has found."""

    found: Found | None
    states: int
    differs: bool
    """Something that can happen leads elsewhere than under the rules that ship."""
    complete: bool
    """Every state was reached."""


def search(graph: Graph, rule: Rule, *, spare: int = SPARE) -> Searched:
    """Breadth first through all states under changed rules, to the first law that is broken.

    Where nothing leads elsewhere, the states are those of the rules that ship, and no more is looked at.

    Args:
        spare: give up after so many states more than those; `Searched.complete` is false then.

    Raises:
        Unsound: the rules that ship break a law.
    """
    sound = graph.sound()
    changed = _Changed(graph, rule)
    if not any(changed.differs(node) for node in sound.asking.get(rule.key, ())):
        return Searched(None, sound.states, False, True)
    known = {graph.first}
    queue = deque([(graph.first, 0)])
    why = changed.broken(graph.first)
    if why:
        return Searched(Found(why, 0), 1, True, False)
    while queue and len(known) < sound.states + spare:
        node, depth = queue.popleft()
        for after, on_the_way in changed.leads(node):
            why = on_the_way
            if not why:
                if after in known:
                    continue
                known.add(after)
                queue.append((after, depth + 1))
                why = changed.broken(after)
            if why:
                return Searched(Found(why, depth + 1), len(known), True, False)
    return Searched(None, len(known), True, not queue)


def walk(graph: Graph, rule: Rule, dice: random.Random) -> tuple[Found | None, int]:
    """At random through the game under changed rules: the law that is broken, and how many steps it took."""
    changed = _Changed(graph, rule)
    node = graph.first
    for number in range(STEPS_MAX):
        why = changed.broken(node)
        if why:
            return Found(why, number), number
        choices = changed.leads(node)
        if not choices:
            return None, number
        node, why = dice.choice(choices)
        if why:
            return Found(why, number + 1), number + 1
    return None, STEPS_MAX
