"""Mutants of the table, one for each thing that a row says."""

from collections.abc import Iterator
from typing import NamedTuple

from refitfsm.check.mutants.graph import Rule
from refitfsm.model.guards import Guard
from refitfsm.model.row import Row, Verdict
from refitfsm.model.states import ServerState
from refitfsm.model.table import BOOK, ROWS, Cell
from refitfsm.model.values import Event, Facts, ServerView

KINDS = ("guard removed", "guard negated", "row dropped", "row redirected", "effect dropped")
NOT = "not "


def _negated(guard: Guard) -> Guard:
    def holds(view: ServerView, event: Event, facts: Facts) -> bool:
        return not guard.holds(view, event, facts)

    return Guard(NOT + guard.name, holds, guard.remedy)


_TURNED = {NOT + name: _negated(guard) for name, guard in BOOK.guards.items()}
_SOUND = BOOK._replace(guards={**BOOK.guards, **_TURNED})


class Mutant(NamedTuple):
    """The table with one thing changed in one row."""

    kind: str
    row: str
    what: str
    """The guard, the effect, or the other destination."""
    cell: Cell
    """Instead of the row's own."""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.row}{': ' if self.what else ''}{self.what}"

    @property
    def rule(self) -> Rule:
        """What a graph takes: the cell that differs, and the whole book."""
        source, event, _ = self.row.split("/")
        key = next(key for key in BOOK.cells if (key[0].value, key[1].value) == (source, event))
        return Rule(key, _SOUND._replace(cells={**BOOK.cells, key: self.cell}))


def mutants() -> Iterator[Mutant]:
    """Every one, in the order of the rows."""
    for row in ROWS:
        cell = BOOK.cells[row.source, row.event]
        yield Mutant("row dropped", row.id, "", tuple(each for each in cell if each is not row))
        for kind, what, other in _changed(row):
            yield Mutant(kind, row.id, what, tuple(other if each is row else each for each in cell))


def _changed(row: Row) -> Iterator[tuple[str, str, Row]]:
    for name in row.guards:
        left = tuple(each for each in row.guards if each != name)
        yield "guard removed", name, row._replace(guards=left)
        turned = tuple(NOT + each if each == name else each for each in row.guards)
        yield "guard negated", name, row._replace(guards=turned)
    for name in row.effects:
        others = tuple(each for each in row.effects if each != name)
        yield "effect dropped", name, row._replace(effects=others)
    if row.verdict is Verdict.TAKE:
        for state in ServerState:
            if state is not (row.destination or row.source):
                yield "row redirected", state.value, row._replace(destination=state)
