"""The leader's questions to the ranks: an order goes out, all reports come back, or one rank is to blame."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from refitfsm.weights.group_base import GroupError, RankGroup
from refitfsm.weights.group_board import BEAT_S, Board, Do, Order, Report, State, first_line
from refitfsm.weights.group_hand import Hand
from refitfsm.weights.group_rank import LocalRank

SILENT_S = 12 * BEAT_S
"""A rank at work that gives no sign of life for so long has ended, or hangs as a whole."""


class Answer(NamedTuple):
    """What a rank did at an order."""

    report: Report
    entry: bytes = b""


class _Sign(NamedTuple):
    """The last change that was seen in a rank's report, and when."""

    report: Report
    at_s: float


class Asker:
    """Orders to all ranks, the leader's own included. One order at a time."""

    def __init__(self, group: RankGroup, local: LocalRank, timeout_s: float) -> None:
        self._group = group
        self._local = local
        self._timeout_s = timeout_s
        self._board = Board(group, timeout_s)
        self._hand = Hand(f"{group.name}-rank")
        self._silent_s = min(SILENT_S, timeout_s / 2)
        self._silent: set[int] = set()
        self._signs: dict[int, _Sign] = {}
        self._order = Order(epoch=self._board.read_order().epoch + 1, seq=-1)

    def ask(self, order: Order, names: tuple[str, ...] = ()) -> dict[int, Answer]:
        """Give an order to its `ranks` and wait until each has done it; epoch and number are filled in.

        Raises:
            GroupError: a rank failed or is late.
        """
        order = self._numbered(order)
        if names:
            self._board.write_names(names)
        if order.ranks != (self._group.leader,):
            self._board.write_order(order)
        own: Future[tuple[Report, bytes]] | None = None
        if self._group.leader in order.ranks:
            own = self._hand.start(lambda: self._local.act(order, names))
        reports = self._collect(order, own)
        return {rank: self._answer(order, rank, reports[rank], own) for rank in order.ranks}

    def tell(self, order: Order) -> None:
        """Give an order that nobody needs to report on, and leave those who can a moment to hear it."""
        order = self._numbered(order)
        self._board.write_order(order)
        hearing = set(self._group.others) - self._silent
        self._until(self._silent_s, lambda: all(map(self._has_left, hearing)))

    def close(self) -> None:
        """Let go of the store."""
        self._board.close()
        self._hand.close()

    def _numbered(self, order: Order) -> Order:
        self._order = msgspec.structs.replace(order, epoch=self._order.epoch, seq=self._order.seq + 1)
        return self._order

    def _has_left(self, rank: int) -> bool:
        report = self._board.read_report(rank)
        return report.epoch == self._order.epoch and report.state is State.FAILED

    def _answer(
        self, order: Order, rank: int, report: Report, own: "Future[tuple[Report, bytes]] | None"
    ) -> Answer:
        if rank == self._group.leader and own is not None:
            return Answer(*own.result())
        if order.do is not Do.MAKE or rank not in order.makers:
            return Answer(report)
        entry = self._board.take_entry(rank)
        if len(entry) != report.entry_bytes:
            raise GroupError(
                f"rank {rank} failed: its entry has {len(entry)} bytes in the store and had"
                f" {report.entry_bytes}: give each group a name of its own"
            )
        return Answer(report, entry)

    def _collect(self, order: Order, own: "Future[tuple[Report, bytes]] | None") -> dict[int, Report]:
        """The report of each rank on this order."""
        reports: dict[int, Report] = {}
        self._signs.clear()

        def are_all_in() -> bool:
            for rank in order.ranks:
                if rank not in reports:
                    report = self._look(rank, order, own)
                    if report is not None:
                        reports[rank] = report
            failed = any(report.state is State.FAILED for report in reports.values())
            return failed or len(reports) == len(order.ranks)

        in_time = self._until(self._timeout_s, are_all_in)
        failed = {rank: report for rank, report in reports.items() if report.state is State.FAILED}
        if in_time and not failed:
            return reports
        late = {rank for rank in order.ranks if rank not in reports}
        self._silent = self._those_silent(late - {self._group.leader}, order, wait=bool(failed))
        raise GroupError(self._blame(failed, late))

    def _look(self, rank: int, order: Order, own: "Future[tuple[Report, bytes]] | None") -> Report | None:
        """A rank's report on an order, or None if it is not through."""
        if rank == self._group.leader and own is not None:
            if not own.done():
                return None
            if error := own.exception():
                return Report(epoch=order.epoch, state=State.FAILED, reason=first_line(error))
            return own.result()[0]
        report = self._board.read_report(rank)
        if rank not in self._signs or self._signs[rank].report != report:
            self._signs[rank] = _Sign(report, time.monotonic())
        if report.epoch != order.epoch or report.state is State.WORKING:
            return None
        return report if report.state is State.FAILED or report.seq == order.seq else None

    def _until(self, timeout_s: float, holds: Callable[[], bool]) -> bool:
        """Wait, giving signs of life; whether it holds in time."""
        now_s = time.monotonic()
        deadline_s, beat_at_s, pause_s = now_s + timeout_s, now_s + BEAT_S, 0.0005
        while not holds():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return False
            if now_s >= beat_at_s:
                beat_at_s = now_s + BEAT_S
                self._order = msgspec.structs.replace(self._order, beat=self._order.beat + 1)
                self._board.write_order(self._order)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, self._group.pause_max_s)
        return True

    def _those_silent(self, late: set[int], order: Order, *, wait: bool) -> set[int]:
        """Those that gave no sign of life lately or, if we wait for one, give none from now on."""
        since_s = time.monotonic() - (0.0 if wait else self._silent_s)

        def silent() -> set[int]:
            for rank in late:
                self._look(rank, order, None)
            return {rank for rank in late if self._signs[rank].at_s <= since_s}

        self._until(self._silent_s if wait else 0.0, lambda: not silent())
        return silent()

    def _blame(self, failed: Mapping[int, Report], late: set[int]) -> str:
        """The ranks that the others wait for, in one line."""
        said = "; ".join(f"rank {rank} failed: {report.reason}" for rank, report in failed.items())
        if failed:
            return f"{_named(self._silent)} gave no sign of life any more; {said}" if self._silent else said
        missing = self._silent or self._furthest_behind(late)
        return f"{_named(missing)} did not answer within {self._timeout_s:g} s"

    def _furthest_behind(self, late: set[int]) -> set[int]:
        """In a collective that hangs, those who have not come to it."""
        begun = {rank: self._board.read_report(rank).begun for rank in late - {self._group.leader}}
        if self._group.leader in late:
            begun[self._group.leader] = self._local.weights.begun
        return {rank for rank in late if begun[rank] == min(begun.values())}


def _named(ranks: set[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
