"""Payloads of `refitfsm.weights` read by the real SGLang and the real torch of this environment.

Run it with the Python that has them; it needs no GPU and starts no server. It prints `N checks passed`,
or ends with a message and a status other than zero. `--write-vectors FOLDER` instead writes what torch
itself pickles, for the tests that run without torch.
"""

import base64
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import common
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from torch.multiprocessing import reductions

from refitfsm.weights.allocations import HANDLE_BYTES, Allocation
from refitfsm.weights.counters import CudaCounts
from refitfsm.weights.cuda import lend
from refitfsm.weights.dtypes import DTYPES, from_torch
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.files import tiny_checkpoint, write_safetensors
from refitfsm.weights.handles import encoded, named_values
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.offer import RankPlace, Target
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.plan import PushWish
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource
from refitfsm.weights.torch_source import TorchSource
from tests.support.borrower import count_down

SENDABLE = [name for name, entry in DTYPES.items() if entry.torch_name is not None]
SHAPES = [(), (1,), (3, 5), (2, 1, 4), (1, 1), (7,)]
TARGET = Target("s", (RankPlace(0, None), RankPlace(1, None)))
UUID = "0a1b2c3d-0000-1111-2222-333344445555"

# The rule of SGLang 0.5.5 to 0.5.20 for the modules that payloads name.
OLD_PREFIXES = ("builtins.", "collections.", "copyreg.", "torch.", "multiprocessing.reduction.")


class OldUnpickler(pickle.Unpickler):
    """Accepts a global by the prefix of its module's name, as releases before 0.5.21 do."""

    def find_class(self, module: str, name: str) -> object:
        if not f"{module}.".startswith(OLD_PREFIXES):
            raise RuntimeError(f"{module}.{name} is off the old list")
        return super().find_class(module, name)


def by_old_rule(entry: bytes) -> object:
    return OldUnpickler(BytesIO(base64.b64decode(entry, validate=True))).load()


def by_sglang(entry: bytes) -> object:
    return common.MultiprocessingSerializer.deserialize(entry.decode("ascii"))


def by_sglang_http(entry: bytes) -> object:
    """The way of releases that decode base64 before the scheduler sees the entry."""
    normalise = getattr(common, "normalize_serialized_named_tensor_payload", base64.b64decode)
    return common.MultiprocessingSerializer.deserialize(normalise(entry))


READERS: list[Callable[[bytes], object]] = [by_sglang, by_sglang_http, by_old_rule]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def sample(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits, so every kind of value, not-a-number among them."""
    entry = DTYPES[dtype]
    spec = TensorSpec.of("sample", dtype, shape)
    bits = torch.randint(0, 2 if dtype == "BOOL" else 256, (spec.nbytes,), dtype=torch.uint8)
    return bits.view(getattr(torch, entry.torch_name or "")).reshape(shape)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (
        type(found) is torch.Tensor
        and found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.is_contiguous()
        and not found.requires_grad
        and found.device.type == "cpu"
        and raw_bytes(found) == raw_bytes(expected)
    )


def require(ok: bool, what: str) -> str:
    if not ok:
        raise SystemExit(f"check failed: {what}")
    return what


def check_dtypes() -> Iterator[str]:
    """Bytes encoded without torch come back as the tensor they stand for."""
    for dtype in SENDABLE:
        tensors = {f"{dtype} {list(shape)}": sample(dtype, shape) for shape in SHAPES}
        entry = cpu_payload(
            (TensorSpec.of(name, dtype, tuple(t.shape)), raw_bytes(t)) for name, t in tensors.items()
        )
        for read in READERS:
            found = read(entry)
            require([name for name, _ in found] == list(tensors), f"names and order by {read.__name__}")
            for name, tensor in found:
                yield require(same(tensor, tensors[name]), f"{name} by {read.__name__}")


def check_against_torch() -> Iterator[str]:
    """Torch's own pickle of a tensor and ours are read as equal tensors of equal strides."""
    for dtype in SENDABLE:
        if DTYPES[dtype].storage is None:
            continue  # torch writes these and cannot read them back
        tensor = sample(dtype, (4, 6))
        theirs = pickle.dumps([("w", tensor)], protocol=4)
        ours = cpu_payload([(TensorSpec.of("w", dtype, (4, 6)), raw_bytes(tensor))])
        ((_, from_theirs),) = by_sglang(base64.b64encode(theirs))
        ((_, from_ours),) = by_sglang(ours)
        yield require(same(from_ours, from_theirs), f"{dtype} as torch writes it")
        yield require(from_ours.stride() == from_theirs.stride(), f"strides of {dtype}")


def check_safetensors(folder: Path) -> Iterator[str]:
    """Our files are read by the safetensors library, and its files by us."""
    samples = {dtype: sample(dtype, (3, 5)) for dtype in SENDABLE if "FNUZ" not in dtype}
    write_safetensors(folder / "ours.safetensors", {d: (d, (3, 5), raw_bytes(t)) for d, t in samples.items()})
    for name, tensor in load_file(folder / "ours.safetensors").items():
        yield require(same(tensor, samples[name]), f"our file's {name} by safetensors")
    theirs = folder / "theirs"
    theirs.mkdir()
    save_file(samples, theirs / "model.safetensors")
    with CheckpointFolder.open(theirs) as checkpoint:
        for spec in checkpoint.manifest.tensors:
            yield require(spec.dtype == spec.name, f"dtype of {spec.name}")
            yield require(
                bytes(checkpoint.tensor(spec.name)) == raw_bytes(samples[spec.name]), f"data of {spec.name}"
            )


def check_checkpoint(folder: Path) -> Iterator[str]:
    """A checkpoint's chunks together are the checkpoint, for every rank."""
    expected = load_file(tiny_checkpoint(folder / "tiny", seed=7) / "model.safetensors")
    source = CheckpointSource(CheckpointFolder.open(folder / "tiny"))
    found: dict[str, torch.Tensor] = {}
    for chunk in source.plan(PushWish(chunk_bytes_max=100_000)).chunks:
        first, second = source.offer(chunk, TARGET).entries
        require(first == second, "ranks get the same bytes")
        found.update(by_sglang(first))
    source.close()
    yield require(found.keys() == expected.keys(), "every tensor is sent")
    for name, tensor in expected.items():
        yield require(same(found[name], tensor), name)


def check_torch_cpu() -> Iterator[str]:
    """CPU tensors of a trainer arrive as they are: parameters, views, tied weights, every dtype."""
    base = sample("BF16", (8, 4))
    tensors = {dtype: sample(dtype, (2, 3)) for dtype in SENDABLE}
    tensors |= {"parameter": torch.nn.Parameter(torch.randn(3, 2)), "slice": base[2:5], "tied": base[2:5]}
    tensors["scalar"] = torch.tensor(1.5)
    tensors["not a leaf"] = torch.nn.Parameter(torch.randn(2)) * 2
    source = TorchSource(iter(tensors.items()))
    (chunk,) = source.plan(PushWish()).chunks
    for read in READERS:
        found = dict(read(source.offer(chunk, TARGET).entries[1]))
        require(found.keys() == tensors.keys(), "every tensor is sent")
        for name, tensor in tensors.items():
            yield require(same(found[name], tensor.detach()), f"torch source, {name} by {read.__name__}")


def check_refusals() -> Iterator[str]:
    """What cannot be sent as it is is refused before anything is sent."""
    plain = torch.zeros(4, 4)
    refused = {
        "contiguous": plain.t()[1:, :3],
        "meta device": plain.to("meta"),
        "layout": plain.to_sparse(),
        "no elements": torch.zeros(0, 3),
        "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
        "no name in safetensors": torch.zeros(2, dtype=torch.complex128),
        "not a torch tensor": [1.0],
    }
    for reason, tensor in refused.items():
        try:
            TorchSource({"w": tensor})
        except WeightsError as error:
            yield require(reason in str(error) and "\n" not in str(error), f"refusal says {reason}: {error}")
        else:
            require(False, f"a tensor should be refused: {reason}")
    for dtype in SENDABLE:
        yield require(from_torch(sample(dtype, (1,)).dtype) == dtype, f"{dtype} is known by its torch name")


class OneAllocation:
    """A driver to which all memory is one tensor's."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._allocation = Allocation(whole.data_ptr(), whole.nbytes)

    def allocation_at(self, _: int) -> Allocation:
        return self._allocation

    def handle_of(self, _: Allocation) -> bytes:
        return b"h" * HANDLE_BYTES


def check_cuda_handles() -> Iterator[str]:
    """A GPU's tensors reach torch's rebuilding call as they lie, and the UUID is looked up by SGLang."""
    whole = torch.arange(64, dtype=torch.float32)
    tensors = {"a": whole[8:14].view(2, 3), "b": whole.view(torch.int16)[64:72], "c": whole[40:41].view(())}
    folder = Path(tempfile.mkdtemp())
    counts = CudaCounts(folder)
    loan = lend(tensors, OneAllocation(whole), counts, UUID)
    entry = encoded(named_values(loan))

    def rebuilt(*given: object) -> torch.Tensor:
        kind, shape, strides, offset, storage, dtype, uuid, handle, nbytes, *rest = given
        name, at, *events = rest[2:]
        require((kind, storage, uuid) == (torch.Tensor, torch.storage.TypedStorage, UUID), "kinds and place")
        require((handle, nbytes) == (b"h" * HANDLE_BYTES, whole.nbytes), "handle and size")
        require((rest[:2], events) == ([0, False], [b"", False]), "the sender has waited: no event")
        count_down(name, at, folder)  # as the borrower does
        return whole.view(dtype).as_strided(shape, strides, offset)

    original = reductions.rebuild_cuda_tensor
    reductions.rebuild_cuda_tensor = rebuilt
    try:
        for read in READERS:
            require(not loan.counters[0].is_back(), "lent before it was read")
            found = dict(read(entry))
            same = all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
            yield require(same and found.keys() == tensors.keys(), f"handles by {read.__name__}")
            yield require(loan.counters[0].is_back(), "back once every tensor has been counted down")
            loan = lend(tensors, OneAllocation(whole), counts, UUID)
            entry = encoded(named_values(loan))
    finally:
        reductions.rebuild_cuda_tensor = original
        counts.close()
    monkey_patch_torch_reductions()
    for read in READERS:
        try:
            read(entry)
        except Exception as error:  # noqa: BLE001 - SGLang raises no narrower class
            yield require(
                str(error) == f"Invalid device_uuid={UUID}", f"unknown GPU by {read.__name__}: {error}"
            )
        else:
            require(False, "an unknown GPU should be refused by SGLang")


def write_vectors(folder: Path) -> None:
    """One file for each dtype that torch can pickle: six elements in shape (2, 3), bytes 0, 1, 2 ..."""
    for dtype in SENDABLE:
        entry = DTYPES[dtype]
        if entry.storage is None:
            continue
        nbytes = TensorSpec.of("w", dtype, (2, 3)).nbytes
        bits = torch.tensor([i % 2 if dtype == "BOOL" else i for i in range(nbytes)], dtype=torch.uint8)
        tensor = bits.view(getattr(torch, entry.torch_name or "")).reshape(2, 3)
        (folder / f"weights_{dtype}.pickle").write_bytes(pickle.dumps([("w", tensor)], protocol=4))


def main() -> None:
    if sys.argv[1:2] == ["--write-vectors"]:
        write_vectors(Path(sys.argv[2]))
        return
    print(f"torch {torch.__version__}, SGLang's unpickler in {common.__file__}")
    torch.manual_seed(0)
    passed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checks = (
            check_dtypes(),
            check_against_torch(),
            check_safetensors(folder),
            check_checkpoint(folder),
            check_torch_cpu(),
            check_refusals(),
            check_cuda_handles(),  # last: it patches torch as SGLang does
        )
        for check in checks:
            passed += sum(1 for _ in check)
    print(f"{passed} checks passed")


if __name__ == "__main__":
    main()
