"""Judge one event on one server: the table's verdict, and the view it leads to.

Total and pure: every event gets an answer, nothing raises, nothing is read but the arguments.
"""

from typing import NamedTuple

from refitfsm.model.table import BOOK, Book, Row, Verdict
from refitfsm.model.values import Event, Facts, ServerView


class Judgement(NamedTuple):
    """What the table says of an event."""

    verdict: Verdict
    row: Row
    """The row taken, or the one that came closest when the event is refused."""
    guards: tuple[tuple[str, bool], ...]
    """Every guard that was asked, in order, with its answer."""
    rule: str = ""
    remedy: str = ""


def judge(view: ServerView, event: Event, facts: Facts, book: Book = BOOK) -> Judgement:
    """The first row of the cell whose guards all hold, or a refusal that names the first that fails."""
    guards = book.guards
    asked: dict[str, bool] = {}
    failed: tuple[Row, str] | None = None
    for row in book.cells[view.state, event.name]:
        for name in row.guards:
            if name not in asked:
                asked[name] = guards[name].holds(view, event, facts)
            if not asked[name]:
                failed = failed or (row, name)
                break
        else:
            return Judgement(row.verdict, row, tuple(asked.items()), row.rule, row.remedy)
    if failed is None:  # pragma: no cover - the table's own check excludes an empty cell
        raise AssertionError(f"no row for {event.name} in {view.state}")
    row, name = failed
    return Judgement(Verdict.REFUSE, row, tuple(asked.items()), name, guards[name].remedy)


def apply(view: ServerView, event: Event, facts: Facts, row: Row, book: Book = BOOK) -> ServerView:
    """The view after a row is taken."""
    for name in row.effects:
        view = book.effects[name](view, event, facts)
    if row.destination is not None:
        view = view._replace(state=row.destination)
    return view
