"""What a fleet is asked, beside the answers of its servers: by callers, by time, and when nothing moves."""

from collections.abc import Iterator

from refitfsm.check.codes import CLOSES_S
from refitfsm.check.joint import Centre, Question
from refitfsm.check.moves import World, requests
from refitfsm.model.fleet import Goal, Phase
from refitfsm.model.values import Event, EventName, Report, ServerView
from refitfsm.planner.cycle import Abandon, ServerEvent, Tick

GIVES_UP = Question("the caller gives up", Abandon("the caller gave up"), busy=True)
TIME_IS_UP = Question("the time is up", Tick(), CLOSES_S)
TURNS_OVER = Question("nobody does anything any more", Tick())
FAULTS = frozenset({GIVES_UP.name, TIME_IS_UP.name})
"""The names of the questions that are faults."""
CALM = frozenset({TURNS_OVER.name, f"asked: {Goal.REFIT}"})
"""The names of what is asked where nothing goes wrong and only refits are wanted."""


def questions(centre: Centre, world: World, *, faults: bool) -> Iterator[Question]:
    """All that a fleet may be asked.

    Args:
        faults: there may be any.
    """
    if centre.cycle is None:
        for request in requests(centre.serving_version, world):
            yield Question(f"asked: {request.goal}", request)
        return
    yield TURNS_OVER
    if faults:
        yield TIME_IS_UP
        if centre.cycle.phase is Phase.WORKING:
            yield GIVES_UP


def answered(view: ServerView, name: EventName, report: Report, seat: int) -> Question:
    """A server answers the command that it has in flight."""
    assert view.pending is not None  # noqa: S101 - for the type checker
    event = Event(name, cycle=view.pending.cycle, seq=view.pending.seq, report=report)
    return Question("", ServerEvent(f"s{seat}", event), busy=True)
