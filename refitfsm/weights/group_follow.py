"""The ranks that do not have the fleet: they do what the leader orders, until the refit ends."""

import time
from concurrent.futures import Future, wait
from contextlib import suppress

import msgspec

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.gather import Gatherer
from refitfsm.weights.group_base import Encode, GroupError, RankGroup
from refitfsm.weights.group_board import BEAT_S, Board, Do, Order, Report, State, first_line
from refitfsm.weights.group_hand import Hand
from refitfsm.weights.group_rank import LocalRank
from refitfsm.weights.local import encode_here


def follow(
    group: RankGroup, weights: Gatherer, encode: Encode = encode_here, *, timeout_s: float
) -> int | None:
    """Take part in the leader's next refit. See `GroupFollower`."""
    return GroupFollower(group, weights, encode, timeout_s=timeout_s).serve()


class GroupFollower:
    """One rank's part in one refit.

    `timeout_s` is how long the leader may be silent. It is silent before it begins, and while a server
    takes a push: give more than the slowest push takes.

    Raises:
        WeightsError: this rank is the leader.
    """

    def __init__(
        self, group: RankGroup, weights: Gatherer, encode: Encode = encode_here, *, timeout_s: float
    ) -> None:
        if group.rank == group.leader:
            raise WeightsError(f"rank {group.rank} is the leader and cannot follow: use GroupSource there")
        self._group = group
        self._timeout_s = timeout_s
        self._rank = LocalRank(group.rank, weights, encode)
        self._board = Board(group, timeout_s)
        self._hand = Hand(f"{group.name}-rank")
        self._report: Report | None = None
        self._heard: tuple[int, int, int] | None = None
        self._heard_at_s = time.monotonic()

    def serve(self) -> int | None:
        """Until the refit ends. Call it once.

        Returns:
            The version that the leader closed the refit with.

        Raises:
            GroupError: the refit failed, on this rank or another, or the leader is silent.
        """
        try:
            return self._serve()
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self._rank.drop()
            self._board.close()
            self._hand.close()

    def _serve(self) -> int | None:
        order = self._begin()
        while not order.ends:
            if self._group.rank in order.ranks:
                self._carry_out(order)
            order = self._next(order)
        if order.do is Do.FAILED:
            raise GroupError(order.reason)
        self._board.write_report(Report(epoch=order.epoch, seq=order.seq))
        return order.version

    def _begin(self) -> Order:
        """The first order of a refit that this rank does not know."""
        last = self._board.read_report(self._group.rank)
        self._heard_at_s = time.monotonic()
        try:
            while True:
                order = self._listen("did not begin")
                # A refit that began when this rank had given up waiting for it is not news any more.
                known = last.epoch + last.missed if order.ends else last.epoch
                if order.epoch > known:
                    break
                time.sleep(self._group.pause_max_s)
        except GroupError:
            self._report = msgspec.structs.replace(last, missed=last.missed + 1)
            raise
        self._report = Report(epoch=order.epoch, seq=order.seq, state=State.WORKING)
        self._board.write_report(self._report)
        return order

    def _next(self, last: Order) -> Order:
        pause_s = 0.0005
        while True:
            order = self._listen("gave no order")
            if order.epoch != last.epoch:
                raise GroupError(f"rank {self._group.leader}, the leader, has begun another refit without us")
            if order.seq != last.seq:
                return order
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, self._group.pause_max_s)

    def _listen(self, failing: str) -> Order:
        """The leader's word.

        Raises:
            GroupError: it has been the same for too long.
        """
        order = self._board.read_order()
        now_s, heard = time.monotonic(), (order.epoch, order.seq, order.beat)
        if self._heard not in (None, heard):
            self._heard_at_s = now_s
        elif now_s > self._heard_at_s + self._timeout_s:
            raise GroupError(f"rank {self._group.leader}, the leader, {failing} within {self._timeout_s:g} s")
        self._heard = heard
        return order

    def _carry_out(self, order: Order) -> None:
        names = self._board.read_names() if order.do is Do.READY else ()
        future = self._hand.start(lambda: self._rank.act(order, names))
        self._wait(future, order)
        if error := future.exception():
            reason = f"rank {self._group.rank} failed: {first_line(error)}"
            self._leave(error)
            raise self._verdict(order, reason) from error
        self._report, entry = future.result()
        if entry:
            self._board.put_entry(entry)
        self._board.write_report(self._report)

    def _wait(self, future: "Future[tuple[Report, bytes]]", order: Order) -> None:
        """Until the work is done, giving signs of life; not for longer than the leader does."""
        working = Report(epoch=order.epoch, seq=order.seq, state=State.WORKING)
        beat_at_s = 0.0
        while not wait({future}, self._group.pause_max_s).done:
            now_s = time.monotonic()
            if now_s >= beat_at_s:
                beat_at_s = now_s + BEAT_S
                begun, beat = self._rank.weights.begun, working.beat + 1
                self._report = working = msgspec.structs.replace(working, begun=begun, beat=beat)
                self._board.write_report(working)
            said = self._listen("gave no sign of life")
            if said.ends or said.epoch != order.epoch:
                raise GroupError(
                    said.reason or f"rank {self._group.leader}, the leader, has gone on without us"
                )

    def _verdict(self, order: Order, reason: str) -> GroupError:
        """Why the refit failed, as the leader sees it: this rank's trouble may be another one's death."""
        try:
            return GroupError(self._next(order).reason or reason)
        except GroupError as silence:
            return GroupError(f"{silence}; {reason}")

    def _leave(self, error: BaseException) -> None:
        if self._report is None or self._report.state is State.FAILED:
            return
        self._report = msgspec.structs.replace(self._report, state=State.FAILED, reason=first_line(error))
        with suppress(GroupError):  # the leader will miss this rank
            self._board.write_report(self._report)
