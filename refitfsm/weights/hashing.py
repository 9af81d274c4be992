"""The checksums that SGLang's `/weights_checker` reports, computed by this process.

A tensor on the CPU has another checksum than the same tensor on a GPU: one is the start of its SHA-256, the
other a hash that a GPU computes quickly. Both are written as 16 hexadecimal digits. Shapes and dtypes do not
count, only the elements' bytes in row-major order.
"""

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from refitfsm.weights.errors import WeightsError

if TYPE_CHECKING:
    import torch

NBYTES_MAX = 1 << 33
"""SGLang cannot hash a larger tensor on a GPU: it counts words of four bytes, with 31 bits."""

TILE_WORDS = 8192
"""Words of four bytes that are hashed as one. The last ones of a tensor may be fewer."""
SEEDS = (0x243F6A88, 0x02C74EE7)
POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
POSITION_TURNS = (15, 13)

_U32, _U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def overall(checksums: Mapping[str, str]) -> str:
    """One rank's `per_gpu_checksum`, from the checksums of its tensors by name."""
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update(f"{name}{checksums[name]}".encode())
    return digest.hexdigest()


def overall_of_ranks(checksums: Iterable[str]) -> str:
    """A server's `per_engine_checksum`, from the `per_gpu_checksum` of its ranks, in their order."""
    return hashlib.sha256("".join(checksums).encode()).hexdigest()


def hash_cpu(tensor: "torch.Tensor") -> str:
    """The checksum of a tensor that a server has on the CPU.

    Raises:
        WeightsError: the tensor is on another device.
    """
    if tensor.device.type != "cpu":
        raise WeightsError(f"a tensor is on {tensor.device}, not on the CPU: call hash_cuda")
    return _hash_bytes([tensor])


def hash_cuda(tensor: "torch.Tensor") -> str:
    """The checksum of a tensor that a server has on a GPU.

    Raises:
        WeightsError: the tensor is on another device, or larger than `NBYTES_MAX`.
    """
    if tensor.device.type != "cuda":
        raise WeightsError(f"a tensor is on {tensor.device}, not on a GPU: call hash_cpu")
    return _hash_words([[tensor]])[0]


def hash_all(tensors: "Sequence[Sequence[torch.Tensor]]") -> list[str]:
    """The checksum of each sequence of tensors, taken as one tensor, on the device that they are on.

    A sequence is of one dtype. On a GPU all are hashed where they lie, in one launch, in the current stream;
    those that are not contiguous, or not of whole words of four bytes, are copied first, one at a time.

    Raises:
        WeightsError: the tensors are not all on one device, or a sequence is larger than `NBYTES_MAX`.
    """
    devices = {part.device for parts in tensors for part in parts}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise WeightsError(f"tensors to be hashed are on {found}: give those of one device at a time")
    if all(device.type == "cpu" for device in devices):
        return [_hash_bytes(parts) for parts in tensors]
    return _hash_words(tensors)


def hash_reference(tensor: "torch.Tensor") -> str:
    """What `hash_cuda` gives, computed by torch alone on any device. It is slow and takes much memory.

    Raises:
        WeightsError: the tensor is larger than `NBYTES_MAX`.
    """
    import torch  # noqa: PLC0415 - the package must import without torch

    _check_size([tensor])
    words = _joined([tensor]).view(torch.int32).to(torch.int64) & _U32
    at = torch.arange(words.numel(), device=words.device)
    tiles = -(-words.numel() // TILE_WORDS)
    total = 0
    for seed, factor, turn, shift in zip(SEEDS, POSITION_FACTORS, POSITION_TURNS, (32, 0), strict=True):
        place = (at * factor + seed) & _U32 ^ (at << turn | at >> 32 - turn) & _U32
        mixed = torch.zeros(tiles * TILE_WORDS, dtype=torch.int64, device=words.device)
        mixed[: words.numel()] = _mix(words ^ place)
        sums = mixed.view(tiles, TILE_WORDS).sum(1)
        total += sum(_mix(sums & _U32 ^ words.numel() * 4 & _U32).tolist()) << shift
    return _finished(total)


def _mix(x: "torch.Tensor") -> "torch.Tensor":
    """Spread 32 bits, held in 64."""
    x = (x ^ x >> 16) * 0x85EBCA6B & _U32
    x = (x ^ x >> 13) * 0xC2B2AE35 & _U32
    return x ^ x >> 16


def _finished(total: int) -> str:
    """The checksum from the sum over the tiles."""
    x = total & _U64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return f"{x ^ x >> 31:016x}"


def _hash_bytes(parts: "Sequence[torch.Tensor]") -> str:
    digest = hashlib.sha256()
    for part in parts:
        whole = part.detach().contiguous()
        # Needs no numpy, copies nothing.
        digest.update((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))
    return digest.hexdigest()[:16]


def _hash_words(tensors: "Sequence[Sequence[torch.Tensor]]") -> list[str]:
    import torch  # noqa: PLC0415

    try:
        from refitfsm.weights.hash_kernel import Job, add_sums  # noqa: PLC0415
    except ImportError as error:
        raise WeightsError(
            f"hashing on a GPU needs triton ({error}): install torch with its CUDA parts"
        ) from None
    for parts in tensors:
        _check_size(parts)
    first = next((part for parts in tensors for part in parts), None)
    if first is None:
        return [_finished(0)] * len(tensors)
    with torch.no_grad(), torch.cuda.device_of(first):
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=first.device)
        in_place = []
        for slot, parts in enumerate(tensors):
            if all(_is_words(part) for part in parts):
                in_place.append(Job(slot, parts))
            else:
                add_sums(sums, [Job(slot, [_joined(parts)])])
        add_sums(sums, in_place)
        return [_finished(total) for total in sums.tolist()]


def _check_size(parts: "Sequence[torch.Tensor]") -> None:
    nbytes = sum(part.nbytes for part in parts)
    if nbytes > NBYTES_MAX:
        raise WeightsError(
            f"a tensor of {nbytes} bytes: SGLang can hash {NBYTES_MAX} at most, so leave it out"
        )


def _is_words(part: "torch.Tensor") -> bool:
    return bool(part.is_contiguous() and part.nbytes % 4 == 0 and part.data_ptr() % 4 == 0)


def _joined(parts: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """A copy of the parts (of one dtype) as bytes, with zeros up to a whole word."""
    import torch  # noqa: PLC0415

    nbytes = sum(part.nbytes for part in parts)
    joined = torch.empty(-(-nbytes // 4) * 4, dtype=torch.uint8, device=parts[0].device)
    joined[nbytes:].zero_()
    at = 0
    for part in parts:
        joined[at : at + part.nbytes].view(part.dtype).view(part.shape).copy_(part.detach())
        at += part.nbytes
    return joined
