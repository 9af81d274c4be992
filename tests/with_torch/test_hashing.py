"""Our hashes of tensors are SGLang's, bit for bit.

SGLang's own kernels and ours run in triton's interpreter, on the CPU: both are imported for it here.
"""

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from refitfsm.weights import hashing
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.hashing import SEEDS, TILE_WORDS, hash_all, hash_cpu, hash_cuda, hash_reference

TILE_BYTES = 4 * TILE_WORDS
SIZES = (0, 1, 2, 3, 4, 5, 4095, 4096, *(TILE_BYTES + more for more in (-5, -1, 0, 1)), 3 * TILE_BYTES + 6)
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
OUR_KERNEL = "refitfsm.weights.hash_kernel"

Hash = Callable[[torch.Tensor], str]
HashMany = Callable[[list[list[torch.Tensor]]], list[str]]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Any]:
    """SGLang's module, and ours, for triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, OUR_KERNEL, raising=False)  # what is compiled cannot be interpreted
        importlib.import_module(OUR_KERNEL)
        yield sglang_module()


@pytest.fixture(scope="module")
def theirs(interpreted: Any) -> Hash:
    return lambda tensor: sglang_hash(interpreted, tensor)


@pytest.fixture(scope="module")
def ours(interpreted: Any) -> HashMany:
    """What a GPU is used by: the same code, given tensors on the CPU."""
    return hashing._hash_words


def sglang_module() -> Any:
    """SGLang's file with the kernels, alone: it needs no other part of SGLang."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "kernels" / "ops" / "memory" / "gpu_tensor_hash.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sglang_hash(kernels: Any, tensor: torch.Tensor, block: int = 256) -> str:
    """SGLang's kernels, launched as it does; `block` words at a time change nothing but how long it takes."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = torch.cat([data, data.new_zeros(-len(data) % 4)]).view(torch.int32)
    if not len(words):
        return "0" * 16
    sums = torch.zeros(-(-len(words) // TILE_WORDS), dtype=torch.int64)
    kernels.hash_tiles32_kernel_blocked[(len(sums),)](
        *(words, sums, len(words)),
        seed1=SEEDS[0],
        seed2=(SEEDS[0] * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=kernels.FMIX32_C1,
        FM_C2=kernels.FMIX32_C2,
        POS_A=kernels.POS_C1,
        POS_B=kernels.POS_C2,
        TILE=TILE_WORDS,
        BLOCK=block,
        USE_CG=True,
    )
    while len(sums) > 1:
        fewer = torch.zeros(-(-len(sums) // 1024), dtype=torch.int64)
        kernels.add_tree_reduce_u64_kernel[(len(fewer),)](sums, fewer, len(sums), CHUNK=1024)
        sums = fewer
    return f"{kernels._final_splitmix64(sums.item()):016x}"


def drawn(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def drawn_as(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A matrix of an odd number of elements. Not all are numbers, and none is lost by copying bytes."""
    if dtype is torch.bool:
        return drawn(33 * 31, seed).view(33, 31) > 127
    return drawn(33 * 31 * dtype.itemsize, seed).view(dtype).view(33, 31)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_size_has_sglangs_hash(theirs: Hash, ours: HashMany, size: int, seed: int) -> None:
    """In bytes: none, no whole word, about one tile, several."""
    tensor = drawn(size, seed)
    assert hash_reference(tensor) == ours([[tensor]])[0] == theirs(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_sglangs_hash(theirs: Hash, ours: HashMany, dtype: torch.dtype) -> None:
    """Only the bytes count, also of a parameter, of a scalar and of a transposed matrix."""
    tensor = drawn_as(dtype, seed=3)
    for given in (tensor, tensor.T, tensor[5, 7]):
        assert hash_reference(given) == ours([[given]])[0] == theirs(given)
    if dtype.is_floating_point and dtype.itemsize > 1:
        parameter = torch.nn.Parameter(tensor)
        assert hash_reference(parameter) == ours([[parameter]])[0] == theirs(tensor)


def test_values_that_are_all_alike_have_sglangs_hash(theirs: Hash, ours: HashMany) -> None:
    """Zeros and ones, of which two lengths never have one hash."""
    found = set()
    for value in (0, 255):
        for size in (4, 8, 4096, TILE_BYTES + 4):
            tensor = torch.full((size,), value, dtype=torch.uint8)
            assert hash_reference(tensor) == ours([[tensor]])[0] == theirs(tensor)
            found.add(hash_reference(tensor))
    assert len(found) == 8


def test_more_than_1024_tiles_have_sglangs_hash(interpreted: Any) -> None:
    """SGLang adds the tiles up in several rounds then. Whole tiles at a time, since interpreting is slow."""
    tensor = drawn(1025 * TILE_BYTES + 12)
    sums = torch.zeros(2, dtype=torch.int64)
    module = importlib.import_module(OUR_KERNEL)
    module.add_sums(sums, [module.Job(1, [tensor])], block_words=TILE_WORDS)
    ours = hashing._finished(int(sums[1]))
    assert hash_reference(tensor) == ours == sglang_hash(interpreted, tensor, TILE_WORDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [
        (64, 32, 32),
        (1000, 4, 7),  # no whole words in between, for some
        (0, 5, 0),
        (),
        (TILE_BYTES, TILE_BYTES),
        (8, TILE_BYTES, 8),  # pieces across the bounds of tiles
        *((1, 2), (12, 20, 4)),
    ],
    ids=str,
)
def test_pieces_are_hashed_as_one(ours: HashMany, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    """In one launch and with other tensors, wherever the pieces begin."""
    whole = drawn(sum(lengths) * dtype.itemsize, seed=4).view(dtype)
    apart = [piece.clone() for piece in whole.split(list(lengths))] if lengths else []
    moved = [torch.cat([piece.new_zeros(1), piece])[1:] for piece in apart]
    alone = drawn(300)
    expected = hash_reference(whole)
    assert ours([apart, [alone], moved, []]) == [expected, hash_reference(alone), expected, "0" * 16]


def test_columns_of_a_matrix_are_hashed(ours: HashMany) -> None:
    """What is not contiguous is hashed in row-major order, alone or below another."""
    matrix = drawn(64 * 48, seed=5).view(torch.bfloat16).view(48, 32)
    columns = matrix[:, 8:24]
    both = torch.cat([columns, matrix[:, :16]])
    assert ours([[columns], [columns, matrix[:, :16]]]) == [hash_reference(columns), hash_reference(both)]


def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    """No GPU is needed to make code for three generations of them; it reads four words at once if it can."""
    code = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from refitfsm.weights import hash_kernel
from refitfsm.weights.hashing import TILE_WORDS
pointers = {"table": "*i64", "piece_of_tile": "*i32", "sums": "*i64"}
for aligned in (True, False):
    given = {"ALIGNED": aligned, "TILE": TILE_WORDS, "BLOCK": hash_kernel.BLOCK_WORDS}
    signature = pointers | dict.fromkeys(given, "constexpr")
    for capability in (80, 90, 100):
        source = ASTSource(fn=hash_kernel._hash_tile, signature=signature, constexprs=given)
        target, options = GPUTarget("cuda", capability, 32), {"num_warps": hash_kernel.WARPS}
        done = compile(source, target=target, options=options)
        assert done.asm["cubin"]
        assert ("v4.b32" in done.asm["ptx"]) == aligned
        assert "add.u64" in done.asm["ptx"]
print("compiled")
"""
    command = [sys.executable, "-c", code]
    env = {
        "PATH": "",
        "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "compiled\n", done.stderr[-2000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_hashes_alike() -> None:
    """On a GPU, too, our kernel and SGLang's agree, and with the reference."""
    kernels = sglang_module()
    for size in (*SIZES, 1025 * TILE_BYTES + 10):
        tensor = drawn(size).cuda()
        assert hash_cuda(tensor) == hash_reference(tensor) == f"{kernels.gpu_tensor_hash(tensor):016x}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cpu_hash_is_the_start_of_the_sha256(dtype: torch.dtype) -> None:
    """Of the bytes in row-major order, wherever they lie, and in however many pieces."""
    tensor = drawn_as(dtype, seed=6)
    for given in (tensor, tensor.T, tensor[:, 3:9], tensor[5, 7], tensor[:0]):
        data = bytes(given.contiguous().reshape(-1).view(torch.uint8).tolist())
        assert hash_cpu(given) == hashlib.sha256(data).hexdigest()[:16]
    whole, none = hash_cpu(tensor), hash_cpu(tensor[:0])
    assert hash_all([[tensor[:4], tensor[4:]], [], [tensor]]) == [whole, none, whole]


def test_a_tensor_of_another_device_is_refused() -> None:
    """Its hash would be another one: the message says which function to call."""
    with pytest.raises(WeightsError, match="on cpu, not on a GPU: call hash_cpu"):
        hash_cuda(torch.zeros(3))
    with pytest.raises(WeightsError, match="on meta, not on the CPU: call hash_cuda"):
        hash_cpu(torch.zeros(3, device="meta"))
    with pytest.raises(WeightsError, match="on cpu and meta: give those of one device"):
        hash_all([[torch.zeros(3)], [torch.zeros(3, device="meta")]])


def test_a_tensor_that_sglang_cannot_hash_is_refused(ours: HashMany) -> None:
    """Beyond 8 GiB SGLang's kernel would read elsewhere: there is no checksum to expect."""
    large = torch.zeros(1).expand(1 << 31, 2)
    for refuses in (lambda: ours([[large]]), lambda: hash_reference(large)):
        with pytest.raises(WeightsError, match="17179869184 bytes: SGLang can hash 8589934592 at most"):
            refuses()
