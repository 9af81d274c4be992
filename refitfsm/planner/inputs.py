"""The planner's inputs as a journal keeps them, and back."""

from refitfsm.model.records import InputKind, InputRecord
from refitfsm.planner.cycle import Abandon, Input, Tick
from refitfsm.planner.requests import Request


def noted(given: Input) -> tuple[InputRecord, ...]:
    """What goes before the records of a step; nothing for a server's event, which is in the first of them."""
    if isinstance(given, Request):
        return (InputRecord(InputKind.REQUEST, given.goal, given.version, given.chunk_bytes),)
    if isinstance(given, Tick):
        return (InputRecord(InputKind.TICK),)
    if isinstance(given, Abandon):
        return (InputRecord(InputKind.ABANDON, reason=given.reason),)
    return ()


def input_of(record: InputRecord) -> Input:
    """What was given.

    Raises:
        ValueError: it is a request for no goal.
    """
    if record.given is InputKind.TICK:
        return Tick()
    if record.given is InputKind.ABANDON:
        return Abandon(record.reason)
    if record.goal is None:
        raise ValueError("a request has a goal")
    return Request(record.goal, record.version, record.chunk_bytes)
