"""Many trainer ranks push to one fleet, and all goes well."""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.gather import Gatherer
from refitfsm.weights.group import GroupError, GroupSource, follow
from refitfsm.weights.offer import RankPlace, Target
from refitfsm.weights.plan import PushWish
from tests.with_torch.ranks import (
    Encoder,
    Net,
    Seat,
    decoded,
    differing,
    gpu,
    model,
    push,
    results,
    sharded,
    target,
)

PATIENT_S = 60.0
"""A deadline that no healthy rank misses."""


def on_cpu(ranks: int) -> Target:
    return Target("server", tuple(RankPlace(rank, None) for rank in range(ranks)))


class Watched(Gatherer):
    """Counts what is alive of all that it ever gathered, in bytes, and how often it did."""

    alive = peak = gathered = 0

    def full(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        found = super().full(names)
        self.gathered += 1
        for _, tensor in found:
            self.alive += tensor.nbytes
            weakref.finalize(tensor, self.gone, tensor.nbytes)
        self.peak = max(self.peak, self.alive)
        return found

    def gone(self, nbytes: int) -> None:
        self.alive -= nbytes


def refit(
    targets: Sequence[Target],
    weights: Callable[[Seat], Gatherer],
    expected: Callable[[], dict[str, torch.Tensor]],
    chunk_bytes_max: int,
    seat: Seat,
) -> object:
    """One refit. The leader: wrong tensors of each server's ranks, and who made them; others: the version."""
    gatherer, encoder, group = weights(seat), Encoder(seat.rank), seat.group()
    if seat.rank != group.leader:
        return follow(group, gatherer, encoder, timeout_s=PATIENT_S)
    with GroupSource(group, gatherer, encoder, timeout_s=PATIENT_S) as source:
        received = push(source, targets, chunk_bytes_max)
        source.close(7)
    return [
        [(int(rank.pop("made by")[0]), differing(rank, expected())) for rank in server] for server in received
    ]


def plain_on_cpu(seat: Seat) -> Gatherer:
    return Gatherer(model())


def parts_on_gpus(seat: Seat) -> Gatherer:
    seat.meet()
    return Gatherer(sharded([Shard(0)], seat.size), gpu_uuid=gpu(seat.rank))


def module_on_gpus(seat: Seat) -> Gatherer:
    seat.meet()
    net = Net()
    mesh = init_device_mesh("cpu", (seat.size,))
    fully_shard(net, mesh=mesh)
    return Gatherer(net.named_parameters(), gpu_uuid=gpu(seat.rank))


def net_whole() -> dict[str, torch.Tensor]:
    return dict(Net().state_dict())


@pytest.mark.parametrize("size", [2, 4])
def test_cpu_tensors_come_from_the_leader(size: int) -> None:
    """Plain CPU tensors are encoded by the leader, for each rank of a server, bit for bit."""
    found = results(size, partial(refit, [on_cpu(3)], plain_on_cpu, model, 100))
    assert found == [[[(0, [])] * 3], *[7] * (size - 1)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("weights", "whole"), [(parts_on_gpus, model), (module_on_gpus, net_whole)], ids=["parts", "module"]
)
def test_each_rank_of_a_server_gets_the_entry_of_its_own_gpu(
    size: int, weights: Callable[[Seat], Gatherer], whole: Callable[[], dict[str, torch.Tensor]]
) -> None:
    """Entries are in the server's rank order, made where its ranks are, and hold the whole tensors."""
    turned = list(reversed(range(size)))
    found = results(size, partial(refit, [target(*turned), target(1)], weights, whole, 150))
    assert found == [[[(rank, []) for rank in turned], [(1, [])]], *[7] * (size - 1)]


def twice_with_another_leader(seat: Seat) -> object:
    group = seat.group(leader=1)
    versions = []
    for version in (3, 4):
        gatherer = Gatherer(model(version), gpu_uuid=gpu(seat.rank))
        if seat.rank != 1:
            versions.append(follow(seat.group(leader=1), gatherer, Encoder(seat.rank), timeout_s=PATIENT_S))
            continue
        with GroupSource(group, gatherer, Encoder(1), timeout_s=PATIENT_S) as source:
            ((made,),) = push(source, [target(0)])
            source.close(version)
        versions.append((int(made.pop("made by")[0]), differing(made, model(version))))
    return versions, group.store.num_keys()


def test_refits_follow_each_other_and_leave_nothing() -> None:
    """Any rank can lead, each refit has its own weights, and the store holds two values a rank at most."""
    (followed, keys), (led, _) = results(2, twice_with_another_leader)
    assert followed == [3, 4]
    assert led == [(0, [])] * 2
    assert keys <= 2 * 2 + 1  # the last is a count that the store keeps itself


def one_chunk_at_a_time(seat: Seat) -> object:
    seat.meet()
    gatherer = Watched(sharded([Shard(0)], seat.size), gpu_uuid=gpu(seat.rank))
    encoder = Encoder(seat.rank)
    chunks = 0
    if seat.rank:
        follow(seat.group(), gatherer, encoder, timeout_s=PATIENT_S)
    else:
        with GroupSource(seat.group(), gatherer, encoder, timeout_s=PATIENT_S) as source:
            chunks = len(source.plan(PushWish(chunk_bytes_max=320)).chunks)
            push(source, [target(0), target(1), target(1, 0, name="both")], 320)
    return (
        gatherer.peak,
        gatherer.alive,
        gatherer.gathered,
        encoder.made,
        encoder.ends.count("settled"),
        chunks,
    )


def test_one_chunk_is_whole_at_a_time() -> None:
    """A chunk is gathered once for all servers and dropped before the next; each server has its own entry."""
    for peak, alive, gathered, made, settled, _ in (found := results(2, one_chunk_at_a_time)):
        chunks = found[0][-1]
        assert chunks > 2
        assert 0 < peak <= 320
        assert alive == 0
        assert (gathered, made, settled) == (chunks, 2 * chunks, 2 * chunks)


def threads_of_servers(seat: Seat) -> object:
    gatherer, encoder = Watched(model(), gpu_uuid=gpu(seat.rank)), Encoder(seat.rank)
    if seat.rank:
        follow(seat.group(), gatherer, encoder, timeout_s=PATIENT_S)
        return gatherer.gathered, sorted(encoder.ends)
    wrong: list[object] = []
    with GroupSource(seat.group(), gatherer, encoder, timeout_s=PATIENT_S, linger_s=PATIENT_S) as source:

        def serve(server: Target) -> None:
            (ranks,) = push(source, [server], 100)
            for rank in ranks:
                rank.pop("made by")
                wrong.append(differing(rank, model()))

        servers = [target(0, name="a"), target(1, name="b"), target(1, 0, name="c")]
        threads = [threading.Thread(target=serve, args=(server,)) for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        chunks = len(source.plan(PushWish(chunk_bytes_max=100)).chunks)
    return wrong, encoder.ends == ["settled"] * 2 * chunks, chunks


def test_servers_are_served_from_several_threads() -> None:
    """Servers at their own pace get all they asked for; at most the first chunks are gathered once more."""
    (wrong, settled, chunks), (gathered, ends) = results(2, threads_of_servers)
    assert wrong == [[]] * 4
    assert settled
    assert ends == ["settled"] * 2 * chunks
    assert chunks <= gathered <= chunks + 4


def withdrawn(seat: Seat) -> object:
    gatherer, encoder = Gatherer(model(), gpu_uuid=gpu(seat.rank)), Encoder(seat.rank)
    if seat.rank:
        follow(seat.group(), gatherer, encoder, timeout_s=PATIENT_S)
        return encoder.ends
    with GroupSource(seat.group(), gatherer, encoder, timeout_s=PATIENT_S) as source:
        (chunk,) = source.plan(PushWish()).chunks
        refused, left = source.offer(chunk, target(1)), source.offer(chunk, target(1))
        refused.withdraw()
        refused.withdraw()
        with pytest.raises(WeightsError, match="was settled or withdrawn"):
            refused.settle()
        assert left.entries != refused.entries
        note = source.offer(chunk, target(1)).settle().note
    with pytest.raises(WeightsError, match="the refit of this source is over"):
        source.offer(chunk, target(1))
    with pytest.raises(WeightsError, match="the refit of this source is over"):
        source.plan(PushWish())
    return note


def test_offers_that_are_not_taken_come_back() -> None:
    """A rank hears once of each offer that is withdrawn, and lets go of those left open at the end."""
    assert results(2, withdrawn) == ["rank 1: 2 ended", ["withdrawn", "settled", "withdrawn"]]


def misplaced(seat: Seat) -> object:
    gatherer, encoder = Gatherer(model(), gpu_uuid=gpu(seat.rank)), Encoder(seat.rank)
    if seat.rank:
        return follow(seat.group(), gatherer, encoder, timeout_s=PATIENT_S)
    said = []
    with GroupSource(seat.group(), gatherer, encoder, timeout_s=PATIENT_S) as source:
        (chunk,) = source.plan(PushWish()).chunks
        unknown = Target("server", (RankPlace(0, None),))
        disordered = Target("server", tuple(reversed(target(0, 1).ranks)))
        for wrong in (target(0, 5), target(1, 1), unknown, disordered, Target("server", ())):
            with pytest.raises(WeightsError) as refused:
                source.offer(chunk, wrong)
            assert not isinstance(refused.value, GroupError)
            said.append(str(refused.value))
            with pytest.raises(WeightsError) as unplanned:
                source.plan(PushWish(targets=(target(0), wrong)))
            assert str(unplanned.value) == said[-1]
        assert decoded(source.offer(chunk, target(1)).entries[0])["made by"].tolist() == [1, 1]
    return said


def test_a_server_on_other_gpus_is_refused_and_the_others_are_not() -> None:
    """A GPU that no rank is on, one given twice, one not known: each is named, already by the plan, and the
    refit goes on."""
    (foreign, double, unknown, *disordered), followed = results(2, misplaced)
    assert "its rank 1 is on GPU 00000005-aa, and the trainer's ranks on 00000000-aa, 00000001-aa" in foreign
    assert "its rank 1 is on GPU 00000001-aa, and so is its rank 0" in double
    assert "its rank 0 is on a GPU that is not known: name them" in unknown
    assert disordered == ["server: its ranks are not 0, 1, ... in order: ask it anew"] * 2
    assert followed is None


def half_applied(seat: Seat) -> object:
    gatherer = Gatherer(model(), gpu_uuid=gpu(seat.rank))
    encoder = Encoder(seat.rank, "flattened_bucket", applied=seat.rank == 0)
    if seat.rank:
        return follow(seat.group(), gatherer, encoder, timeout_s=PATIENT_S)
    with GroupSource(seat.group(), gatherer, encoder, timeout_s=PATIENT_S) as source:
        (chunk,) = source.plan(PushWish()).chunks
        none = source.offer(chunk, target(1))
        with pytest.raises(WeightsError) as halved:
            source.offer(chunk, target(0, 1)).settle()
        assert not isinstance(halved.value, GroupError)
        return str(halved.value), none.settle().applied, none.load_format


def test_a_push_that_was_applied_in_part_is_told() -> None:
    """A server that took some entries and not others holds no version; one that took none may retry."""
    (said, applied, load_format), _ = results(2, half_applied)
    assert said.startswith("server applied the entries of ranks [0] and not those of the others (rank 0: 1 ")
    assert not applied
    assert load_format == "flattened_bucket"
