"""Records to a log, for people who watch. This is the only module that imports structlog.

The journal is the audit; a log may be filtered, sampled or lost. By default records go through the
standard library's logger `refitfsm`, which is quiet until the application configures logging.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import structlog

from refitfsm.model.records import FleetRecord, Record, Turn
from refitfsm.model.table import Verdict
from refitfsm.model.values import EventName

logging.getLogger("refitfsm").addHandler(logging.NullHandler())


class Logger(Protocol):
    """What is asked of a logger: structlog's bound loggers have it."""

    def bind(self, **values: object) -> "Logger": ...
    def log(self, level: int, event: str, **values: object) -> object: ...


def default_logger() -> Logger:
    """structlog over the standard library's logger `refitfsm`; nothing global is configured."""
    logger: Logger = structlog.wrap_logger(
        logging.getLogger("refitfsm"),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return logger


_BAD = (EventName.FAILED, EventName.LOST, EventName.DIED)


class LogSink:
    """Writes records to a logger: a cycle's turns at info, a server's steps at debug, trouble at warning."""

    def __init__(self, run_id: str, logger: Logger | None = None) -> None:
        self._logger = (logger if logger is not None else default_logger()).bind(run=run_id)

    def warn(self, what: str) -> None:
        """Something that a person should know, and that is no record."""
        self._logger.log(logging.WARNING, what)

    def emit(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, FleetRecord):
                self._turn(record)
            else:
                refused = record.verdict is Verdict.REFUSE
                bad = refused or (record.event.name in _BAD and record.verdict is Verdict.TAKE)
                extra = {"rule": record.rule} if refused else {}
                self._logger.log(
                    logging.WARNING if bad else logging.DEBUG,
                    record.event.name.value,
                    server=record.server,
                    cycle=record.facts.cycle,
                    state=record.after.state.value,
                    verdict=record.verdict.value,
                    detail=record.event.detail,
                    **extra,
                )

    def _turn(self, record: FleetRecord) -> None:
        cycle = record.cycle
        bad = record.turn in (Turn.ABORTING, Turn.DROPPED, Turn.REFUSED)
        about = {"cycle": cycle.id, "goal": cycle.goal.value} if cycle else {}
        reason = {"reason": record.reason} if record.reason else {}
        self._logger.log(
            logging.WARNING if bad else logging.INFO,
            f"cycle {record.turn.value}",
            serving_version=record.serving_after,
            **about,
            **reason,
        )
