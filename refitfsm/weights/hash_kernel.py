"""SGLang's hash of GPU tensors, in one launch for any number of them.

The hash of a tensor is made from the sum, modulo 2^64, of the hashes of its tiles. A tile's hash is made from
two sums over its words of four bytes, each mixed with its position in the tensor. So tiles can be hashed in
any order, and a tensor may lie in several places: its pieces are read where they are.

One program hashes one tile. The mixing takes more time than the memory does, so a tile that lies in one piece
is read without bounds checks, and the sums of the threads are brought together once, at the tile's end.

Imported when CUDA tensors are hashed: it needs triton, which torch brings along with CUDA.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from refitfsm.weights.hashing import POSITION_FACTORS, POSITION_TURNS, SEEDS, TILE_WORDS

WARPS = 4
BLOCK_WORDS = 1024
_ALIGNMENT_BYTES = 16

# The table has a row for each piece. Words count from the tensor's start, tiles from the first of the launch.
_ADDRESS = tl.constexpr(0)
_BEGIN = tl.constexpr(1)
_END = tl.constexpr(2)
_WORDS = tl.constexpr(3)  # of the whole tensor
_FIRST_TILE = tl.constexpr(4)  # of the whole tensor
_SLOT = tl.constexpr(5)  # where the tensor's sum goes
_COLUMNS = tl.constexpr(6)

_SEED_1, _SEED_2 = map(tl.constexpr, SEEDS)
_FACTOR_1, _FACTOR_2 = map(tl.constexpr, POSITION_FACTORS)
_TURN_1, _TURN_2 = map(tl.constexpr, POSITION_TURNS)


class Job(NamedTuple):
    """One tensor to be hashed: contiguous pieces of whole words, in order, and where its sum goes."""

    slot: int
    pieces: Sequence[torch.Tensor]


def add_sums(sums: torch.Tensor, jobs: Sequence[Job], *, block_words: int = BLOCK_WORDS) -> None:
    """Add the sum over the tiles of each job to its slot of `sums` (int64, on the device of the pieces).

    A program reads `block_words` at a time; that divides a tile.

    On a GPU this returns before the work is done, which is queued in the current stream.
    """
    rows, starts, tiles = _table(jobs)
    if not rows:
        return
    # Not blocking: else each launch would wait for the one before.
    table = torch.tensor(rows).to(sums.device, non_blocking=True)
    begins = torch.tensor(starts).to(sums.device, non_blocking=True)
    places = torch.arange(0, tiles * TILE_WORDS, TILE_WORDS, device=sums.device)
    piece_of_tile = torch.searchsorted(begins, places, right=True, out_int32=True) - 1
    aligned = all(row[0] % _ALIGNMENT_BYTES == 0 and row[1] * 4 % _ALIGNMENT_BYTES == 0 for row in rows)
    _hash_tile[(tiles,)](
        *(table, piece_of_tile, sums),
        ALIGNED=aligned,
        TILE=TILE_WORDS,
        BLOCK=block_words,
        num_warps=WARPS,
    )


def _table(jobs: Sequence[Job]) -> tuple[list[tuple[int, ...]], list[int], int]:
    """The rows, the place of each in the line of all tiles (in words), and the number of tiles."""
    rows: list[tuple[int, ...]] = []
    starts: list[int] = []
    tiles = 0
    for slot, pieces in jobs:
        words = sum(piece.nbytes for piece in pieces) // 4
        begin = 0
        for piece in pieces:
            end = begin + piece.nbytes // 4
            if end > begin:
                rows.append((piece.data_ptr(), begin, end, words, tiles, slot))
                starts.append(tiles * TILE_WORDS + begin)
            begin = end
        tiles += -(-words // TILE_WORDS)
    return rows, starts, tiles


@triton.jit  # type: ignore[untyped-decorator]
def _mix(x: "tl.tensor") -> "tl.tensor":
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(
    word: "tl.tensor",
    at: "tl.tensor",
    FACTOR: tl.constexpr,  # noqa: N803 - constants of the compiled kernel
    SEED: tl.constexpr,  # noqa: N803
    TURN: tl.constexpr,  # noqa: N803
) -> "tl.tensor":
    return _mix(word ^ (at * FACTOR + SEED) ^ ((at << TURN) | (at >> (32 - TURN))))


@triton.jit  # type: ignore[untyped-decorator]
def _both(word: "tl.tensor", at: "tl.tensor") -> "tuple[tl.tensor, tl.tensor]":
    """What words add to each of the two sums."""
    first = _mixed(word, at, _FACTOR_1, _SEED_1, _TURN_1)
    return first, _mixed(word, at, _FACTOR_2, _SEED_2, _TURN_2)


@triton.jit  # type: ignore[untyped-decorator]
def _hash_tile(  # noqa: PLR0917 - a launch gives pointers by position
    table: "tl.tensor",
    piece_of_tile: "tl.tensor",
    sums: "tl.tensor",
    ALIGNED: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    tile = tl.program_id(0)
    row = table + tl.load(piece_of_tile + tile).to(tl.int64) * _COLUMNS
    words = tl.load(row + _WORDS)
    slot = tl.load(row + _SLOT)
    at = (tile - tl.load(row + _FIRST_TILE)) * TILE
    limit = tl.minimum(at + TILE, words)
    lanes = tl.arange(0, BLOCK)
    first = tl.zeros((BLOCK,), tl.uint32)
    second = tl.zeros((BLOCK,), tl.uint32)
    while at < limit:
        stop = tl.minimum(tl.load(row + _END), limit)
        place = tl.load(row + _ADDRESS) + (at - tl.load(row + _BEGIN)) * 4
        source = place.to(tl.pointer_type(tl.uint32))
        if ALIGNED:
            source = tl.multiple_of(source, 16)
        if stop - at == TILE:
            for offset in tl.static_range(0, TILE, BLOCK):
                word = tl.load(source + offset + lanes)
                one, two = _both(word, (at + offset).to(tl.uint32) + lanes.to(tl.uint32))
                first += one
                second += two
        else:
            count = (stop - at).to(tl.int32)
            for offset in range(0, count, BLOCK):
                inside = offset + lanes < count
                word = tl.load(source + offset + lanes, mask=inside, other=0)
                one, two = _both(word, (at + offset).to(tl.uint32) + lanes.to(tl.uint32))
                first += tl.where(inside, one, 0)
                second += tl.where(inside, two, 0)
        at = stop
        row += _COLUMNS
    length = (words * 4).to(tl.uint32)
    high = _mix(tl.sum(first, axis=0).to(tl.uint32) ^ length).to(tl.uint64)
    low = _mix(tl.sum(second, axis=0).to(tl.uint32) ^ length).to(tl.uint64)
    tl.atomic_add(sums + slot, ((high << 32) | low).to(tl.int64, bitcast=True), sem="relaxed")
