"""A source that is kept looks at its tensors anew: it sends what they are, or says what is wrong."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from refitfsm.pushes import as_source
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.files import tiny_checkpoint
from refitfsm.weights.offer import RankPlace, Target
from refitfsm.weights.plan import PushWish, Strategy
from refitfsm.weights.torch_source import TorchSource
from tests.with_torch.ranks import decoded

TARGET = Target("server", (RankPlace(0, None),))


def sent(source: TorchSource) -> dict[str, torch.Tensor]:
    """What a push of everything carries, as bytes."""
    (chunk,) = source.plan(PushWish()).chunks
    return decoded(source.offer(chunk, TARGET).entries[0])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4, bias=False)
        self.last = torch.nn.Linear(3, 4, bias=False)


def test_a_modules_parameters_are_read_at_each_refit() -> None:
    """Parameters that were put into other memory are sent from there."""
    net = Net()
    source = TorchSource(net)
    sent(source)
    net.first.weight.data = torch.full((4, 3), 7.0)
    assert torch.equal(sent(source)["first.weight"], torch.full((4, 3), 7.0))


def test_tied_weights_are_sent_once() -> None:
    """A module that ties weights sends them as its checkpoint has them."""
    net = Net()
    net.last.weight = net.first.weight
    net._tied_weights_keys = ["last.weight"]  # type: ignore[assignment]
    assert list(sent(TorchSource(net))) == ["first.weight"]


class Scaled(torch.nn.Linear):
    def get_extra_state(self) -> object:
        return {"scale": 2}

    def set_extra_state(self, state: object) -> None: ...


def test_what_a_module_saves_beside_its_tensors_is_not_sent() -> None:
    """Extra state is no part of a checkpoint: the tensors are sent as if there were none."""
    assert list(sent(TorchSource(Scaled(3, 4, bias=False)))) == ["weight"]


def test_a_closed_source_is_refused_before_the_refit_begins(tmp_path: Path) -> None:
    """What was let go is not planned, whatever it was made of; the error is ours, in one line."""
    folder = as_source(tiny_checkpoint(tmp_path, seed=0))
    for source in (TorchSource(Net()), TorchSource(Net(), share_host_memory=True), folder):
        source.plan(PushWish())
        source.close()
        source.close()
        with pytest.raises(WeightsError, match=r"was closed: (make a new one|open the checkpoint again)"):
            source.plan(PushWish())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file, in shared memory neither, may be larger than a mebibyte."""
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))


@pytest.mark.usefixtures("small_files")
def test_shared_memory_without_room_is_an_error_with_a_remedy() -> None:
    """What torch cannot put there is named, with what to give; what went there before is let go."""
    given = {"small": torch.ones(4), "large": torch.ones(1 << 19)}
    with pytest.raises(
        WeightsError, match=r"^tensor 'large': its memory cannot be shared .*--shm-size"
    ) as caught:
        TorchSource(given, share_host_memory=True)
    assert "\n" not in str(caught.value)


def test_memory_that_cannot_be_looked_at_is_not_back() -> None:
    """A process without a free file descriptor does not take a loan for returned."""
    source = TorchSource({"w": torch.ones(4)}, share_host_memory=True)
    (chunk,) = source.plan(PushWish(Strategy.LIST)).chunks
    offer = source.offer(chunk, TARGET)
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        lent = source.open_leases
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    assert lent == ("server",)
    offer.withdraw()
    assert source.open_leases == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: setattr(w, "data", w.data.t()), "not contiguous"),
        (lambda w: setattr(w, "data", w.data.half()), "has dtype F16, and F32 was expected"),
        (lambda w: setattr(w, "data", w.data[:2]), r"has shape \[2, 4\], and \[4, 4\] was expected"),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_tensors_that_are_not_what_they_were_are_refused(change, reason: str, shared: bool) -> None:  # type: ignore[no-untyped-def]
    """What changed its shape, order, number format or memory is refused before the refit begins."""
    weight = torch.randn(4, 4)
    source = TorchSource({"w": weight}, share_host_memory=shared)
    source.plan(PushWish())
    change(weight)
    with pytest.raises(WeightsError, match=reason):
        source.plan(PushWish())


def test_a_tensor_that_gave_up_its_memory_is_refused() -> None:
    """A storage that was emptied is never read."""
    weight = torch.randn(4, 4)
    source = TorchSource({"w": weight})
    weight.untyped_storage().resize_(0)
    with pytest.raises(WeightsError, match="given up its memory"):
        source.plan(PushWish())


@pytest.mark.parametrize("strategy", [Strategy.LIST, Strategy.REGISTERED, Strategy.BUCKET])
def test_tensors_that_moved_since_the_plan_are_not_lent(strategy: Strategy) -> None:
    """What is offered is what was checked: whatever has become of a tensor since, no server is sent to it."""
    weight = torch.randn(4, 4)
    source = TorchSource({"w": weight, "v": torch.ones(3)}, share_host_memory=True)
    plan = source.plan(PushWish(strategy))
    weight.data = torch.randn(4, 4)
    with pytest.raises(WeightsError, match="moved since the push was planned"):
        source.offer(plan.chunks[0], TARGET)
    assert source.open_leases == ()


def test_beside_a_registration_on_a_gpu_nothing_else_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server keeps mapped counts back too early when it is lent once more: another way is refused."""
    source = TorchSource({"w": torch.ones(3)}, share_host_memory=True)
    monkeypatch.setattr(source._replicas[0].memory, "place", "a-gpu", raising=False)
    source.plan(PushWish(Strategy.LIST))
    source._registrations._open["http://s"] = None  # type: ignore[assignment]
    with pytest.raises(WeightsError, match=r"^http://s keeps these tensors mapped .* forget_after_refit"):
        source.plan(PushWish(Strategy.LIST))
    source.plan(PushWish(Strategy.REGISTERED))


def test_a_plan_of_another_refit_is_refused() -> None:
    """A chunk of a plan that was replaced is never packed with other tensors' values."""
    source = TorchSource({f"t{i}": torch.full((1000,), float(i)) for i in range(8)}, share_host_memory=True)
    first = source.plan(PushWish(Strategy.BUCKET, bucket_bytes=8000))
    source.plan(PushWish(Strategy.BUCKET, bucket_bytes=16_000))
    with pytest.raises(WeightsError, match="planned anew"):
        source.offer(first.chunks[1], TARGET)


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(3, 2),
        [torch.zeros(3)],
        {1: torch.zeros(3)},
        [("w", torch.zeros(3), 1)],
        b"weights",
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
        torch.nn.Linear,
        torch.nn.LazyLinear(3),
        {"w": torch.nn.LazyLinear(3).weight},
        3,
    ],
)
def test_what_is_no_weights_is_refused_in_one_line(odd: object) -> None:
    """Whatever else is given, the error is ours, and says what to give."""
    with pytest.raises(WeightsError, match=r"give|tensor") as caught:
        as_source(odd)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
