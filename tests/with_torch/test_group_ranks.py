"""Which ranks make a group, and whether they fit together."""

import pytest
import torch.distributed as dist

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.gather import Gatherer
from refitfsm.weights.group import GroupSource, RankGroup, follow
from tests.with_torch.ranks import Encoder, Ranks, Seat, differing, gpu, model, push, results, target

PATIENT_S = 60.0
"""A deadline that no healthy rank misses."""


def alone(seat: Seat) -> object:
    seat.meet()
    group = RankGroup.from_default()
    with pytest.raises(WeightsError, match="rank 0 is the leader and cannot follow"):
        follow(group, Gatherer(model()), Encoder(0), timeout_s=PATIENT_S)
    with GroupSource(group, Gatherer(model()), Encoder(0), timeout_s=PATIENT_S) as source:
        ((made,),) = push(source, [target(0)])
        source.release()
    made.pop("made by")
    return (group.rank, group.size, group.leader), differing(made, model())


def test_a_group_can_be_of_one() -> None:
    """The default process group is a group, with nobody to follow where it has one rank."""
    assert results(1, alone) == [((0, 1, 0), [])]


def split_in_two(seat: Seat) -> object:
    seat.meet()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = RankGroup.of(halves[seat.rank // 2], leader=1)
    gatherer = Gatherer(model(seat.rank // 2), gpu_uuid=gpu(seat.rank))
    if group.rank != 1:
        with pytest.raises(WeightsError, match="rank 0 is not the leader, 1 is: call follow there"):
            GroupSource(group, gatherer, Encoder(0), timeout_s=PATIENT_S)
        return follow(group, gatherer, Encoder(seat.rank), timeout_s=PATIENT_S)
    with GroupSource(group, gatherer, Encoder(seat.rank), timeout_s=PATIENT_S) as source:
        ((made,),) = push(source, [target(seat.rank - 1)])
        source.close(seat.rank)
    return int(made.pop("made by")[0]), differing(made, model(seat.rank // 2))


def test_groups_of_one_job_do_not_meet() -> None:
    """Each process group has a store of its own and counts its own ranks, and roles are checked."""
    assert results(4, split_in_two) == [1, (0, []), 3, (2, [])]


def test_there_is_no_group_without_ranks() -> None:
    """A rank or a leader outside of the group, or no process group at all, is refused."""
    with pytest.raises(WeightsError, match="leader 2 is not in a group of 2: count from 0"):
        RankGroup(dist.HashStore(), 0, 2, leader=2)
    with pytest.raises(WeightsError, match="there is no process group: call"):
        RankGroup.from_default()


def test_other_tensors_and_shared_gpus_are_refused_before_any_push() -> None:
    """Ranks that do not fit together fail when they join, and each is told which."""
    for work, said in [
        (other_names, "rank 1 has other tensors than rank 0: give all ranks the same"),
        (one_gpu, "ranks 0 and 1 are both on GPU 00000003-aa: give each rank a GPU of its own"),
        (one_without_gpu, "rank 1 has its tensors on the CPU, rank 0 on GPU 00000000-aa: give all"),
    ]:
        with Ranks(2, work) as ranks:
            outcomes = ranks.outcomes()
        assert [outcome.error for outcome in outcomes] == ["GroupError"] * 2
        assert all(outcome.text.startswith(said) for outcome in outcomes), outcomes


def join(gatherer: Gatherer, seat: Seat) -> object:
    if seat.rank:
        return follow(seat.group(), gatherer, Encoder(1), timeout_s=PATIENT_S)
    return GroupSource(seat.group(), gatherer, Encoder(0), timeout_s=PATIENT_S).close()


def other_names(seat: Seat) -> object:
    return join(Gatherer({f"{name}{seat.rank}": tensor for name, tensor in model().items()}), seat)


def one_gpu(seat: Seat) -> object:
    return join(Gatherer(model(), gpu_uuid=gpu(3)), seat)


def one_without_gpu(seat: Seat) -> object:
    return join(Gatherer(model(), gpu_uuid=None if seat.rank else gpu(0)), seat)
