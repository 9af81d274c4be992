"""The second judge: the table as one `transitions` machine.

This is the only module that imports `transitions`. One synchronous machine is shared by all servers;
its models are throw-away rows that are not registered. Guards are callables, there are no effects in
callbacks, and no automatic transitions. The machine re-judges what the planner decided, from the
same rows but by other code; when the two disagree, a law is broken.
"""

from collections.abc import Callable
from typing import cast

from transitions import EventData, Machine

from refitfsm.errors import InvariantViolation
from refitfsm.model.guards import Guard
from refitfsm.model.records import ServerRecord
from refitfsm.model.states import ServerState
from refitfsm.model.table import BOOK, Book, Row, Verdict
from refitfsm.model.values import Event, Facts, ServerView


class _Model:
    """What one judgement needs: the state that the machine reads and writes, and the guards' arguments."""

    __slots__ = ("arguments", "row", "state")

    def __init__(self, view: ServerView, event: Event, facts: Facts) -> None:
        self.state: str = view.state.value
        self.arguments = (view, event, facts)
        self.row: Row | None = None


def _condition(guard: Guard) -> Callable[[EventData], bool]:
    def holds(data: EventData) -> bool:
        return guard.holds(*cast("_Model", data.model).arguments)

    holds.__name__ = guard.name
    return holds


def _marker(row: Row) -> Callable[[EventData], None]:
    def mark(data: EventData) -> None:
        cast("_Model", data.model).row = row

    return mark


class Referee:
    """Judges events with a `transitions` machine. Use from one thread."""

    def __init__(self, book: Book = BOOK) -> None:
        conditions = {name: _condition(guard) for name, guard in book.guards.items()}
        self.machine = Machine(
            model=None,
            states=[state.value for state in ServerState],
            transitions=[
                {
                    "trigger": row.event.value,
                    "source": row.source.value,
                    # an internal row: the state stays, no exit or entry takes place
                    "dest": row.destination.value if row.destination else None,
                    "conditions": [conditions[name] for name in row.guards],
                    "after": [_marker(row)],
                }
                for cell in book.cells.values()
                for row in cell
                if row.verdict is not Verdict.REFUSE
            ],
            initial=ServerState.OFFLINE.value,
            auto_transitions=False,
            send_event=True,
            queued=False,
            ignore_invalid_triggers=True,
        )

    def judge(self, view: ServerView, event: Event, facts: Facts) -> tuple[Row | None, ServerState]:
        """The row that the machine takes, or None when it refuses; and the state it ends in."""
        model = _Model(view, event, facts)
        self.machine.events[event.name.value].trigger(model)
        return model.row, ServerState(model.state)

    def check(self, record: ServerRecord) -> None:
        """Judge a record again.

        Raises:
            InvariantViolation: the machine takes another row or ends in another state.
        """
        row, state = self.judge(record.before, record.event, record.facts)
        planned = None if record.verdict is Verdict.REFUSE else record.row
        taken = row.id if row else None
        if taken != planned or state is not record.after.state:
            raise InvariantViolation(
                f"{record.server}: planner and machine disagree on {record.event.name} in"
                f" {record.before.state}: planner takes {planned} to {record.after.state},"
                f" machine takes {taken} to {state}"
            )
