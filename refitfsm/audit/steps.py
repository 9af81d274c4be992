"""Judge the steps of a run: what each was given, and that its records are an answer to that.

A step is what a planner decides on one input, at one time: a request and the turn that answers it, an
event of one server, a time that is up and the commands that are lost by it, a request taken back.
"""

from collections.abc import Mapping

from refitfsm.audit.broken import Broken
from refitfsm.audit.lines import FleetBody, InputBody, ServerBody
from refitfsm.model.fleet import OF_A_VERSION
from refitfsm.model.records import InputKind, Turn
from refitfsm.model.values import REQUESTS, EventName, ServerView

_DECIDED = frozenset({*REQUESTS, EventName.UNCOMMITTED})
"""Events that a planner makes; the others come from outside."""
_ANSWERS = (Turn.OPENED, Turn.REFUSED, Turn.ABSORBED)
"""Of a request. The last two end their step."""


StepBody = InputBody | ServerBody | FleetBody


class StepAudit:
    """Folds the lines. `views` are the servers' last states, kept by whoever folds the servers."""

    def __init__(self, views: Mapping[str, ServerView]) -> None:
        self._views = views
        self._step = 0
        self._at_s = 0.0
        self._given: InputBody | None = None
        """Of the step, unless it is a server's event."""
        self._waits = False
        """The input has been read, and what it led to has not."""
        self._over = False
        """Nothing more can belong to the step."""
        self._last: dict[bool, str] = {}
        """The last server since the cycle turned: of those decided on, and of those whose time was up."""

    def take(self, body: StepBody, event: EventName | None) -> bool:
        """A line before it is folded, with its event if it has one. Whether a step begins with it."""
        if body.step != self._step:
            self.end()
            self._begin(body, event)
            return True
        self._go_on(body, event)
        return False

    def end(self) -> None:
        """A step is over when the next begins, or the journal was closed."""
        if self._waits:
            raise Broken(f"step {self._step} was given something, and nothing is written of it")
        if self._given is not None and self._given.given is InputKind.TICK:
            late = [
                name
                for name, view in self._views.items()
                if view.pending and view.pending.deadline_s <= self._at_s
            ]
            if late:
                raise Broken(f"{late[0]}: its command's time was up at step {self._step}, and it is not lost")

    def _begin(self, body: StepBody, event: EventName | None) -> None:
        if body.step != self._step + 1:
            raise Broken("the steps have a gap: lines are missing, repeated or moved")
        if body.at_s < self._at_s:
            raise Broken("time runs backwards")
        self._step, self._at_s, self._over = body.step, body.at_s, False
        self._last.clear()
        if isinstance(body, InputBody):
            self._given, self._waits = body, True
        elif event is not None and event not in _DECIDED:
            self._given, self._waits = None, False
        else:
            raise Broken(f"step {body.step} begins with what somebody has to have decided")

    def _go_on(self, body: StepBody, event: EventName | None) -> None:
        if body.at_s != self._at_s:
            raise Broken(f"step {body.step} has two times")
        if self._over or isinstance(body, InputBody):
            raise Broken(f"step {body.step} has more in it than one input leads to")
        if isinstance(body, ServerBody) and event is not None:
            self._event(body.server, event)
        elif isinstance(body, FleetBody):
            self._turn(body)
        self._waits = False

    def _event(self, server: str, event: EventName) -> None:
        """One of several in a step. Servers come in the order of their names, so that a step has one form."""
        decided = event in _DECIDED
        if self._last.get(decided, "") > server:
            raise Broken(f"{server}: its turn in step {self._step} was before that of another")
        self._last[decided] = server
        if not decided:
            self._check_expired(server, event)
        elif self._waits:
            raise Broken(f"{server}: {event} does not follow from the input of step {self._step}")

    def _check_expired(self, server: str, event: EventName) -> None:
        """Only a tick has events within a step, for commands whose time is up."""
        tick = self._given is not None and self._given.given is InputKind.TICK
        pending = self._views[server].pending if server in self._views else None
        if not tick or event is not EventName.LOST or pending is None:
            raise Broken(f"{server}: {event} is a step of its own")
        if pending.deadline_s > self._at_s:
            raise Broken(f"{server}: its command is lost before its time is up")

    def _turn(self, body: FleetBody) -> None:
        given = self._given if self._waits else None
        if (body.turn in _ANSWERS) != (given is not None and given.given is InputKind.REQUEST):
            raise Broken(f"{body.turn} and what step {body.step} was given do not fit")
        self._over = body.turn in (Turn.REFUSED, Turn.ABSORBED, Turn.CLOSED)
        if body.turn is not Turn.DROPPED:
            self._last.pop(True, None)
        if given is not None and given.given is InputKind.REQUEST:
            _check_answer(given, body)
        elif given is not None and body.turn is not Turn.ABORTING:
            raise Broken(f"{body.turn} does not follow from the input of step {body.step}")


def _check_answer(given: InputBody, body: FleetBody) -> None:
    """The turn is about what was asked for."""
    if given.goal is None:
        raise Broken("a request has a goal")
    if body.turn is not Turn.OPENED:
        return
    cycle = body.cycle
    version = given.version if given.goal in OF_A_VERSION else cycle.version if cycle else 0
    if cycle is None or (cycle.goal, cycle.version, cycle.chunk_bytes) != (
        given.goal,
        version,
        given.chunk_bytes,
    ):
        raise Broken(f"{given.goal} is asked for, and another cycle is opened")
