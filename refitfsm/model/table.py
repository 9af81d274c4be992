"""The transition table of one server: the rules, as data.

Every (state, event) pair has a cell: an ordered tuple of rows, of which the first whose guards all
hold is taken. A cell that can run out of rows ends in an explicit refusal or an explicit ignore. The
`transitions` machine, the planner's lookup, the documentation and the diagram are made from these
rows; nothing else in the package knows which step is legal.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from refitfsm.model import rows_of_answers, rows_of_requests
from refitfsm.model.effects import EFFECTS, Effect
from refitfsm.model.guards import GUARDS, Guard
from refitfsm.model.row import Row, Verdict
from refitfsm.model.states import ServerState
from refitfsm.model.values import REQUESTS, EventName

Cell = tuple[Row, ...]
Key = tuple[ServerState, EventName]


class TableError(ValueError):
    """The table contradicts itself; raised at import."""


def _numbered(rows: Iterable[Row]) -> tuple[Row, ...]:
    counts: dict[Key, int] = {}
    numbered = []
    for row in rows:
        count = counts.get((row.source, row.event), 0)
        counts[row.source, row.event] = count + 1
        numbered.append(row._replace(id=f"{row.source}/{row.event}/{count}"))
    return tuple(numbered)


def _checked(rows: tuple[Row, ...]) -> dict[Key, Cell]:
    """The rows by cell, after checking that they are sound.

    Raises:
        TableError: a name that does not exist, a cell without rows, a row that can never be taken, a
            cell of answers that can run out of rows.
    """
    cells: dict[Key, Cell] = {}
    for row in rows:
        for name in row.guards:
            if name not in GUARDS:
                raise TableError(f"{row.id}: there is no guard {name}")
        for name in row.effects:
            if name not in EFFECTS:
                raise TableError(f"{row.id}: there is no effect {name}")
        cells[row.source, row.event] = (*cells.get((row.source, row.event), ()), row)
    for state in ServerState:
        for event in EventName:
            _check_cell(state, event, cells.get((state, event), ()))
    return cells


def _check_cell(state: ServerState, event: EventName, cell: Cell) -> None:
    if not cell:
        raise TableError(f"{state} does not answer {event}")
    for index, row in enumerate(cell):
        shadowed = any(set(earlier.guards) <= set(row.guards) for earlier in cell[:index])
        if shadowed:
            raise TableError(f"{row.id} can never be taken: an earlier row asks for no more")
    if event not in REQUESTS and cell[-1].guards:
        raise TableError(f"{state} can run out of rows for {event}")


ROWS: tuple[Row, ...] = _numbered((*rows_of_requests.ROWS, *rows_of_answers.ROWS))
"""The rules, in the order in which they are written."""

TABLE: dict[Key, Cell] = _checked(ROWS)
"""The rules by (state, event)."""


class Book(NamedTuple):
    """The rules, and what the names in them stand for. Checks try others than the shipped ones."""

    cells: Mapping[Key, Cell]
    guards: Mapping[str, Guard]
    effects: Mapping[str, Effect]


BOOK = Book(TABLE, GUARDS, EFFECTS)
"""The rules that hold."""

__all__ = ["BOOK", "ROWS", "TABLE", "Book", "Cell", "Key", "Row", "TableError", "Verdict"]
