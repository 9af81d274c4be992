"""`TorchSource` on stand-ins for tensors: real ones are in `tests/real/check_payload.py`."""

import ctypes
from dataclasses import dataclass, field
from math import prod

import pytest
from weights_payload_reader import STRICT, Handle, globals_of, read

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.source import RankPlace, WeightSource
from refitfsm.weights.torch_source import TorchSource

UUID = "0a1b2c3d-0000-1111-2222-333344445555"


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


class Sharing:
    """Counts consumers, and gives each another handle."""

    def __init__(self, *, refuse: bool = False, surplus: tuple[object, ...] = ()) -> None:
        self.consumers = 0
        self.collected = 0
        self._refuse = refuse
        self._surplus = surplus

    def uuid(self, device: int) -> str:
        assert device == GPU.index
        return UUID

    def reduce(self, tensor: Tensor) -> tuple[object, ...]:
        if self._refuse:
            raise RuntimeError("invalid argument\nCompile with ...")
        self.consumers += 1
        memory = (b"handle", 12, 512, False, b"counter", self.consumers, b"event", True)
        return (type(tensor), tensor.shape, (3, 1), 0, type(self), tensor.dtype, 3, *memory, *self._surplus)

    def collect(self) -> None:
        self.collected += 1


def on_gpu(**options) -> tuple[TorchSource, Sharing]:
    sharing = Sharing(**options)
    return TorchSource({"v": Tensor(device=GPU), "w": Tensor(device=GPU)}, cuda=sharing), sharing


def places(*uuids: str | None) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(rank, uuid) for rank, uuid in enumerate(uuids))


@pytest.mark.parametrize("as_pairs", [True, False])
def test_cpu_tensors_travel_as_their_bytes(as_pairs: bool) -> None:
    """From a mapping or from pairs, a CPU tensor is sent as the bytes it has at the time of the call."""
    tensor = Tensor()
    source: WeightSource = TorchSource(iter([("w", tensor)]) if as_pairs else {"w": tensor})
    (chunk,) = source.chunks(1 << 20)
    first = source.payloads(chunk, places(None, UUID))
    assert first[0] == first[1]
    tensor.memory[0] = 99
    changed = source.payloads(chunk, places(None))
    for entry, byte in ((first[0], 0), (changed[0], 99)):
        ((name, found),) = read(entry)
        assert (name, found.shape, found.storage.cls) == ("w", (2, 3), "torch.BFloat16Storage")
        assert found.storage.data == bytes([byte, *range(1, 12)])
    assert source.load_format is None


def test_gpu_tensors_travel_as_handles() -> None:
    """A GPU tensor is torch's own rebuilding call, with the GPU's UUID where torch has a number."""
    source, _ = on_gpu()
    (chunk,) = source.chunks(1 << 20)
    (entry,) = source.payloads(chunk, places(UUID))
    found = read(entry)
    assert [name for name, _ in found] == ["v", "w"]
    head = ("torch.Tensor", (2, 3), (3, 1), 0, "torch.storage.TypedStorage", "torch.bfloat16", UUID)
    assert found[0][1] == Handle((*head, b"handle", 12, 512, False, b"counter", 1, b"event", True))
    assert globals_of(entry) - STRICT == {("torch", "bfloat16")}


def test_each_consumer_has_its_own_handles() -> None:
    """Two ranks, two servers, two attempts: no GPU payload is given twice."""
    source, sharing = on_gpu()
    (chunk,) = source.chunks(1 << 20)
    entries = [*source.payloads(chunk, places(None, None)), *source.payloads(chunk, places(UUID))]
    assert len(set(entries)) == 3
    assert sharing.consumers == 6


@pytest.mark.parametrize("spelling", [UUID, f"GPU-{UUID}", f"gpu-{UUID.upper()}", f"GPU-{UUID}\n"])
def test_a_rank_on_the_same_gpu_is_served(spelling: str) -> None:
    """A UUID is the same with and without its prefix, in either case."""
    source, _ = on_gpu()
    (chunk,) = source.chunks(1 << 20)
    assert source.payloads(chunk, places(spelling)) != ()


def test_a_rank_on_another_gpu_is_refused() -> None:
    """Handles are made for no rank if one of the ranks is known to be elsewhere."""
    source, sharing = on_gpu()
    (chunk,) = source.chunks(1 << 20)
    with pytest.raises(WeightsError, match=rf"rank 1 is on GPU GPU-other, the tensors are on GPU {UUID}"):
        source.payloads(chunk, places(UUID, "GPU-other"))
    assert sharing.consumers == 0


def test_tensors_are_held_until_close() -> None:
    """The source keeps its tensors until closed; then it gives no payload and frees GPU memory once."""
    source, sharing = on_gpu()
    (chunk,) = source.chunks(1 << 20)
    source.close()
    source.close()
    assert sharing.collected == 1
    with pytest.raises(WeightsError, match="were let go"):
        source.payloads(chunk, places(None))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ([1.0], "is a list, not a torch tensor"),
        (ShardedTensor(), r"is a DTensor, here only in part: give tensor.full_tensor\(\)"),
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


def test_one_storage_under_two_names_is_sent_twice() -> None:
    """Tied weights are two tensors to the server."""
    tensor = Tensor()
    source = TorchSource({"v": tensor, "w": tensor})
    (chunk,) = source.chunks(1 << 20)
    assert [name for name, _ in read(source.payloads(chunk, places(None))[0])] == ["v", "w"]


def test_torch_that_cannot_share_is_reported() -> None:
    """A refusal of torch becomes one line that names the tensor; so does a torch of another kind."""
    for source, reason in (
        (on_gpu(refuse=True)[0], r"cannot share its GPU memory \(invalid argument\)"),
        (on_gpu(surplus=(1,))[0], "by 16 values, 15 were expected"),
    ):
        (chunk,) = source.chunks(1 << 20)
        with pytest.raises(WeightsError, match=rf"^tensor 'v': .*{reason}") as caught:
            source.payloads(chunk, places(None))
        assert "\n" not in str(caught.value)
