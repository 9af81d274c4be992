"""Many trainer ranks push to one fleet, and one of them fails: it is named on every rank, in time."""

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from refitfsm.weights.gather import Gatherer
from refitfsm.weights.group import Encode, GroupError, GroupSource, LocalEntry, RankGroup, follow
from refitfsm.weights.offer import Settled
from tests.with_torch.ranks import WAIT_S, Encoder, Ranks, Seat, gpu, model, push, results, sharded, target

PATIENT_S = 30.0
"""A deadline that no healthy rank misses."""
SHORT_S = 3.0
"""A deadline that is to be missed. The ranks of a test meet before, so they start within far less."""
HANG_S = 15.0
"""Beyond this a deadline was not kept, whatever else the machine does."""

Deed = Callable[[Seat], object]


class Failing(Gatherer):
    """Does a deed at a moment of the refit."""

    def __init__(self, inner: Gatherer, moment: str, deed: Callable[[], object]) -> None:
        self.__dict__ |= inner.__dict__
        self._deeds = {moment: deed}

    def do(self, moment: str) -> None:
        self._deeds.get(moment, int)()

    def require(self, names: Sequence[str]) -> None:
        self.do("ready")
        super().require(names)

    def full(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        self.do("gather")
        return super().full(names)

    def encoding(self, encode: Encode) -> Encode:
        """An encoder that does its deeds too."""

        def failing(tensors: Sequence[tuple[str, torch.Tensor]]) -> LocalEntry:
            self.do("encode")
            return FailingEntry(encode(tensors), lambda: self.do("settle"))

        return failing


class FailingEntry(NamedTuple):
    """An entry that does a deed before it is settled."""

    inner: LocalEntry
    deed: Callable[[], object]
    load_format: str | None = None

    @property
    def entry(self) -> bytes:
        return self.inner.entry

    def settle(self) -> Settled:
        self.deed()
        return self.inner.settle()

    def withdraw(self) -> None:
        self.inner.withdraw()


def complain(_: Seat) -> None:
    raise ValueError("the disk is\nfull")


def end(_: Seat) -> None:
    os._exit(1)


def be_late(seat: Seat) -> None:
    """Until the others have said what they have to say."""
    seat.store().wait(["told"], timedelta(seconds=WAIT_S))


def fail_at(moment: str, deed: Deed, who: int, seat: Seat) -> object:
    """A refit in which one rank does what it should not. All meet before, so that the deadline is its own."""
    seat.meet()
    plain, group = Gatherer(sharded([Shard(0)], seat.size), gpu_uuid=gpu(seat.rank)), seat.group()
    weights = Failing(plain, moment if seat.rank == who else "", partial(deed, seat))
    encode = weights.encoding(Encoder(seat.rank))
    dist.barrier()
    weights.do("join")
    if seat.rank != group.leader:
        return follow(group, weights, encode, timeout_s=SHORT_S)
    with GroupSource(group, weights, encode, timeout_s=SHORT_S) as source:
        return push(source, [target(*range(seat.size))], 200)


def failure(size: int, moment: str, deed: Deed, who: int) -> list[str]:
    """What the other ranks say, each within its deadline."""
    with Ranks(size, partial(fail_at, moment, deed, who)) as ranks:
        others = [ranks.outcome(rank) for rank in range(size) if rank != who]
        ranks.store.set("told", "1")
        culprit = ranks.outcome(who)
    assert [other.error for other in others] == ["GroupError"] * (size - 1), others
    assert max(other.took_s for other in others) < HANG_S
    assert culprit.ended if deed is end else culprit.error
    return [other.text for other in others]


@pytest.mark.parametrize("moment", ["ready", "gather", "encode", "settle"])
@pytest.mark.parametrize(("size", "who"), [(2, 0), (2, 1), (4, 3)])
def test_a_rank_that_raises_is_named_to_all(moment: str, size: int, who: int) -> None:
    """An error on one rank, leader or not, fails the refit on each: with its first line and the rank."""
    assert failure(size, moment, complain, who) == [f"rank {who} failed: the disk is"] * (size - 1)


@pytest.mark.parametrize("moment", ["join", "ready", "gather", "encode", "settle"])
def test_a_rank_that_ends_is_named_to_all(moment: str) -> None:
    """A rank whose process ends fails the refit on each, even where that breaks the others' collective."""
    for said in failure(4, moment, end, 2):
        assert said.startswith(("rank 2 did not answer within 3 s", "rank 2 gave no sign of life any more; "))


@pytest.mark.parametrize("moment", ["join", "ready", "gather", "encode", "settle"])
def test_a_rank_that_is_late_is_named_to_all(moment: str) -> None:
    """A rank that does not come fails the refit on each, even if they wait for it in a collective."""
    assert failure(4, moment, be_late, 3) == ["rank 3 did not answer within 3 s"] * 3


@pytest.mark.parametrize("moment", ["join", "ready", "gather", "encode"])
def test_a_leader_that_ends_is_named_to_all(moment: str) -> None:
    """A leader whose process ends is named by each rank on its own."""
    for said in failure(4, moment, end, 0):
        assert said.startswith("rank 0, the leader, "), said


def give_up(seat: Seat) -> object:
    if seat.rank:
        return follow(seat.group(), Gatherer(model()), Encoder(1), timeout_s=PATIENT_S)
    with GroupSource(seat.group(), Gatherer(model()), Encoder(0), timeout_s=PATIENT_S):
        raise RuntimeError("no server is left")


def test_a_leader_that_gives_up_tells_all() -> None:
    """An error of the leader's own reaches the other ranks."""
    with Ranks(2, give_up) as ranks:
        leader, other = ranks.outcomes()
    assert (leader.error, leader.text) == ("RuntimeError", "no server is left")
    assert (other.error, other.text) == ("GroupError", "rank 0, the leader, gave up: no server is left")


def leave_the_leader_out(seat: Seat) -> object:
    return seat.rank and follow(seat.group(), Gatherer(model()), Encoder(1), timeout_s=0.5)


def test_a_leader_that_never_begins_is_named() -> None:
    """A rank does not wait for ever for a refit to begin."""
    with Ranks(2, leave_the_leader_out) as ranks:
        _, other = ranks.outcomes()
    assert (other.error, other.text) == ("GroupError", "rank 0, the leader, did not begin within 0.5 s")
    assert other.took_s < HANG_S


def try_twice(first: int, seat: Seat) -> object:
    """Two refits. In the first, one rank comes when the other has given up."""
    seat.meet()
    said: list[object] = []
    for timeout_s in (0.3, PATIENT_S):
        if not said and seat.rank != first:
            be_late(seat)
        try:
            if seat.rank:
                said.append(follow(seat.group(), Gatherer(model()), Encoder(1), timeout_s=timeout_s))
            else:
                with GroupSource(seat.group(), Gatherer(model()), Encoder(0), timeout_s=timeout_s) as source:
                    source.close(5)
                said.append(5)
        except GroupError as error:
            said.append(str(error))
            seat.store().set("told", "1")
        dist.barrier()  # as a step of training would
    return said


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_missed_each_other_meet_in_the_next_refit(first: int) -> None:
    """A refit that one side came to late is over once for each, and the next has both."""
    leader, other = results(2, partial(try_twice, first))
    assert leader == ["rank 1 did not answer within 0.3 s", 5]
    alone = "rank 1 did not answer" if first == 0 else "rank 0, the leader, did not begin"
    assert other == [f"{alone} within 0.3 s", 5]


def keep_the_store(seat: Seat) -> object:
    """The leader keeps the group's store, and ends in the middle."""
    shared = seat.store()
    if seat.rank == 0:
        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared.set("port", str(kept.port))
        weights = Failing(Gatherer(model()), "encode", partial(end, seat))
        group = RankGroup(kept, 0, 2)
        source = GroupSource(group, weights, weights.encoding(Encoder(0)), timeout_s=PATIENT_S)
        return push(source, [target(0)])
    group = RankGroup(seat._replace(port=int(shared.get("port"))).store(), 1, 2)
    return follow(group, Gatherer(model()), Encoder(1), timeout_s=PATIENT_S)


def test_a_leader_that_takes_the_store_along_is_named() -> None:
    """When the store ends with its keeper, a rank says so at once."""
    with Ranks(2, keep_the_store) as ranks:
        leader, other = ranks.outcomes()
    assert leader.ended
    assert other.error == "GroupError"
    assert other.text.startswith("the store is gone (")
    assert other.text.endswith("): whoever keeps it, most often rank 0, the leader, has ended or hangs")
    assert other.took_s < HANG_S


def other_formats(seat: Seat) -> object:
    weights, encode = Gatherer(model(), gpu_uuid=gpu(seat.rank)), Encoder(seat.rank, f"format {seat.rank}")
    if seat.rank:
        return follow(seat.group(), weights, encode, timeout_s=PATIENT_S)
    return push(GroupSource(seat.group(), weights, encode, timeout_s=PATIENT_S), [target(0, 1)])


def test_entries_of_different_formats_are_not_sent() -> None:
    """Ranks whose encoders differ fail the refit: one order has one load format."""
    with Ranks(2, other_formats) as ranks:
        outcomes = ranks.outcomes()
    assert [outcome.error for outcome in outcomes] == ["GroupError"] * 2
    said = "ranks 0, 1 encode for load formats 'format 0', 'format 1': give all one encoder"
    assert [outcome.text for outcome in outcomes] == [said] * 2


class HangingStore:
    """A store on a machine that answers no more."""

    def __init__(self) -> None:
        self.told = threading.Event()

    def set(self, key: str, value: str, /) -> None:
        self.told.wait()

    def get(self, key: str, /) -> bytes:
        self.told.wait()
        return b""

    def check(self, keys: list[str], /) -> bool:
        self.told.wait()
        return False

    def delete_key(self, key: str, /) -> bool:
        self.told.wait()
        return False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_hangs_hangs_nobody(rank: int) -> None:
    """Leader and others wait for the store no longer than their deadline."""
    store = HangingStore()
    part = GroupSource if rank == 0 else follow
    with pytest.raises(GroupError, match=r"the store is gone \(no answer within 0.1 s\): whoever keeps it"):
        part(RankGroup(store, rank, 2), Gatherer(model()), Encoder(rank), timeout_s=0.1)
    store.told.set()
