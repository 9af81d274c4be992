"""Whole tensors from their parts."""

import weakref
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.gather import Gatherer
from tests.with_torch.ranks import Net, Ranks, Seat, differing, model, results, sharded


def gather_sharded(placements: list[Placement], mesh_shape: tuple[int, ...], seat: Seat) -> object:
    seat.meet()
    gatherer = Gatherer(sharded(placements, *mesh_shape))
    names = list(reversed(model()))
    full = gatherer.full(names)
    return [name for name, _ in full] == names, differing(dict(full), model()), gatherer.begun


@pytest.mark.parametrize(
    ("placements", "mesh_shape"),
    [
        ([Shard(0)], (2,)),
        ([Shard(0)], (4,)),
        ([Replicate(), Shard(0)], (2, 2)),
        ([Shard(0), Shard(0)], (2, 2)),
    ],
    ids=["2", "4", "replicated 2 times", "sharded twice"],
)
def test_parts_become_the_whole(placements: list[Placement], mesh_shape: tuple[int, ...]) -> None:
    """Every rank gets every tensor whole, bit for bit, in the order asked for, whatever rows each has."""
    size = torch.Size(mesh_shape).numel()
    expected = (True, [], len(model()))
    assert results(size, partial(gather_sharded, placements, mesh_shape)) == [expected] * size


def gather_columns(seat: Seat) -> object:
    seat.meet()
    mesh = init_device_mesh("cpu", (seat.size,))
    matrix = model()["up"]
    summed = DTensor.from_local(matrix / seat.size, mesh, [Partial()])
    turned = distribute_tensor(matrix, mesh, [Shard(1)]).t()
    given = {"columns": distribute_tensor(matrix, mesh, [Shard(1)]), "sum": summed, "turned": turned}
    expected = {"columns": matrix, "sum": matrix, "turned": matrix.t()}
    return differing(dict(Gatherer(given).full(list(given))), expected)


def test_columns_sums_and_views_become_the_whole() -> None:
    """Parts that are columns, summands or views of something else are put together as well, contiguous."""
    assert results(2, gather_columns) == [[], []]


def gather_fsdp(seat: Seat) -> object:
    seat.meet()
    expected = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    net = Net()
    mesh = init_device_mesh("cpu", (seat.size,))
    fully_shard(net.first, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net(torch.ones(2, 7)).sum().backward()  # as after a step: sharded anew, with gradients
    gatherer = Gatherer(net.named_parameters())
    whole = gatherer.full(list(expected))
    kept = [name for name, tensor in whole if tensor.requires_grad]
    return differing(dict(whole), expected), kept, gatherer.begun


@pytest.mark.parametrize("size", [2, 4])
def test_a_sharded_module_becomes_the_whole(size: int) -> None:
    """The parameters of a module sharded by FSDP2 are gathered bit for bit, without their gradients."""
    assert results(size, gather_fsdp) == [([], [], 3)] * size


def describe(seat: Seat) -> object:
    seat.meet()
    parts = sharded([Shard(0)], seat.size)
    with CommDebugMode() as traffic:
        manifest = Gatherer(parts).manifest
    return manifest == Gatherer(model()).manifest, traffic.get_total_counts()


def test_a_manifest_needs_no_gathering() -> None:
    """The manifest of parts is that of the whole tensors, and making it speaks to no other rank."""
    assert results(2, describe) == [(True, 0)] * 2


def drop(seat: Seat) -> object:
    seat.meet()
    gatherer = Gatherer(sharded([Shard(0)], seat.size))
    alive = []
    for name in model():
        watched = [weakref.ref(tensor) for _, tensor in gatherer.full([name])]
        alive += [name for tensor in watched if tensor() is not None]
    return alive


def test_what_was_gathered_is_not_kept() -> None:
    """A gathered tensor lives as long as its caller keeps it, and no longer."""
    assert results(2, drop) == [[], []]


def leave_out(seat: Seat) -> object:
    seat.meet()
    ones, mine = torch.ones(4), DeviceMesh("cpu", [0])
    part = DTensor.from_local(ones, mine, [Replicate()], run_check=False)
    return differing(dict(Gatherer({"a": part}).full(["a"])), {"a": ones})


def test_a_rank_outside_of_the_mesh_is_refused() -> None:
    """A rank that a tensor has no part on cannot gather it, and says so before anyone tries."""
    with Ranks(2, leave_out) as ranks:
        gathered, refused = ranks.outcomes()
    assert (gathered.result, gathered.text) == ([], "")
    assert refused.error == "WeightsError"
    assert refused.text == "tensor 'a' has no part on this rank: use a mesh of all ranks of the group"


def test_plain_tensors_are_passed_on() -> None:
    """A plain tensor is not copied, and needs no process group."""
    tensors = model()
    gatherer = Gatherer(tensors.items())
    assert [tensor is tensors[name] for name, tensor in gatherer.full(list(tensors))] == [True] * len(tensors)
    assert gatherer.begun == 0
    assert gatherer.gpu_uuid is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": [1.0]}, "'a' is a list, not a torch tensor"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "complex128, which has no name in safetensors"),
        ({"a": torch.zeros(0, 3)}, "has no elements"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "'a' is given twice"),
        ({"a": torch.ones(1), "b": torch.ones(1, device="meta")}, "'b' is on meta and 'a' on cpu"),
    ],
)
def test_what_cannot_be_sent_is_refused_at_once(given: object, said: str) -> None:
    """Tensors without a sendable format, elements or one place are refused before anything is gathered."""
    with pytest.raises(WeightsError, match=said):
        Gatherer(given)


def test_an_unknown_name_is_refused_before_the_first_tensor() -> None:
    """A rank that lacks one of the names begins no collective."""
    with pytest.raises(WeightsError, match="no tensor 'b' on this rank"):
        Gatherer({"a": torch.ones(1)}).full(["a", "b"])
