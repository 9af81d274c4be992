"""What `TorchSource` refuses, on stand-ins for tensors: real ones are in `tests/with_torch`."""

import ctypes
from dataclasses import dataclass, field
from math import prod

import pytest
from weights_payload_reader import read

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.offer import RankPlace, Target
from refitfsm.weights.plan import PushWish, Strategy
from refitfsm.weights.torch_source import TorchSource


@dataclass(frozen=True)
class Device:
    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


CPU, GPU = Device("cpu"), Device("cuda", 3)


@dataclass
class Tensor:
    """What the source asks of a torch tensor; bytes in memory where a CPU tensor has them."""

    shape: tuple[int, ...] = (2, 3)
    dtype: str = "torch.bfloat16"
    device: Device = CPU
    layout: str = "torch.strided"
    is_meta: bool = False
    is_nested: bool = False
    is_quantized: bool = False
    contiguous: bool = True
    conj: bool = False
    memory: ctypes.Array = field(init=False)

    def __post_init__(self) -> None:
        self.memory = (ctypes.c_char * (2 * prod(self.shape)))(*range(2 * prod(self.shape)))

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def stride(self) -> tuple[int, ...]:
        return (3, 1)

    def is_contiguous(self) -> bool:
        return self.contiguous

    def is_conj(self) -> bool:
        return self.conj

    def is_neg(self) -> bool:
        return False


class ShardedTensor(Tensor):
    def full_tensor(self) -> Tensor:
        raise NotImplementedError


class WrappedTensor(Tensor):
    def __tensor_flatten__(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ([1.0], "is a list, not a torch tensor"),
        (ShardedTensor(), r"is a DTensor, here only in part"),
        (WrappedTensor(), "is a WrappedTensor"),
        (Tensor(is_meta=True), "is on the meta device"),
        (Tensor(is_nested=True), "is a nested tensor"),
        (Tensor(layout="torch.sparse_coo"), r"has layout torch.sparse_coo: give tensor.to_dense\(\)"),
        (Tensor(is_quantized=True), "is quantised"),
        (Tensor(conj=True), "is a lazy conjugate"),
        (Tensor(device=Device("mps", 0)), "is on mps:0"),
        (Tensor(dtype="torch.complex128"), "is torch.complex128, which has no name in safetensors"),
        (Tensor(shape=(0, 3)), "has no elements"),
        (Tensor(contiguous=False), r"is not contiguous: give tensor.contiguous\(\)"),
    ],
)
def test_what_is_not_plain_memory_is_refused(tensor: object, reason: str) -> None:
    """A tensor whose memory is not simply its elements is refused at once, with the remedy."""
    with pytest.raises(WeightsError, match=rf"^tensor 'w' (of shape .* )?{reason}"):
        TorchSource({"w": tensor})


def test_names_and_devices_are_checked_over_all_tensors() -> None:
    """A name given twice and tensors on several devices are refused."""
    with pytest.raises(WeightsError, match="'w' is given twice"):
        TorchSource([("w", Tensor()), ("w", Tensor())])
    with pytest.raises(WeightsError, match="'w' is on cuda:3 and 'v' on cpu"):
        TorchSource({"v": Tensor(), "w": Tensor(device=GPU)})


@pytest.mark.parametrize("as_pairs", [True, False])
def test_cpu_tensors_travel_as_their_bytes(as_pairs: bool) -> None:
    """From a mapping or from pairs, a CPU tensor is sent as the bytes it has at the time of the call."""
    tensor = Tensor()
    source = TorchSource(iter([("w", tensor)]) if as_pairs else {"w": tensor})
    (chunk,) = source.plan(PushWish()).chunks
    target = Target("s", (RankPlace(0, None), RankPlace(1, "GPU-x")))
    first = source.offer(chunk, target).entries
    assert first[0] == first[1]
    tensor.memory[0] = 99
    changed = source.offer(chunk, target).entries
    for entry, byte in ((first[0], 0), (changed[0], 99)):
        ((name, found),) = read(entry)
        assert (name, found.shape, found.storage.cls) == ("w", (2, 3), "torch.BFloat16Storage")
        assert found.storage.data == bytes([byte, *range(1, 12)])


@pytest.mark.parametrize("strategy", [Strategy.BUCKET, Strategy.MIXED, Strategy.REGISTERED])
def test_bytes_cannot_be_mapped(strategy: Strategy) -> None:
    """A way of pushing that lends memory is refused for private host memory, with the remedy."""
    with pytest.raises(WeightsError, match="give CUDA tensors, or TorchSource"):
        TorchSource({"w": Tensor()}).plan(PushWish(strategy))


def test_one_storage_under_two_names_is_sent_twice() -> None:
    """Tied weights are two tensors to the server."""
    tensor = Tensor()
    source = TorchSource({"v": tensor, "w": tensor})
    (chunk,) = source.plan(PushWish()).chunks
    (entry,) = source.offer(chunk, Target("s", (RankPlace(0, None),))).entries
    assert [name for name, _ in read(entry)] == ["v", "w"]


def test_nothing_to_push_is_refused() -> None:
    """A source of no tensors is a mistake."""
    with pytest.raises(WeightsError, match="no tensors"):
        TorchSource({})
