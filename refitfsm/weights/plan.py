"""How a manifest is cut into pushes, and what that needs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.offer import Target

SMALL_BYTES = 1 << 20
"""`mixed`: below this, opening a tensor's handle takes the server longer than copying it twice."""
MANY_SMALL = 256
"""`auto`: a request more takes as long as this many tensors in the same, so a bucket should save as many."""


class Strategy(StrEnum):
    """How weights are handed over."""

    AUTO = "auto"
    """`registered` where the servers have the loader, else `mixed` or `list`: see `choose`."""
    LIST = "list"
    """The tensors as they lie: their handles, or their bytes."""
    BUCKET = "bucket"
    """Packed into buffers of bounded size in turn, one filled while the servers read another."""
    MIXED = "mixed"
    """Small tensors packed into one buffer, large ones as they lie."""
    TENSOR = "tensor"
    """One push a tensor: slow, for comparison."""
    REGISTERED = "registered"
    """Mapped once by the server's loader, which afterwards copies at a word."""


class Form(StrEnum):
    """What one push carries."""

    LIST = "list"
    BUCKET = "bucket"
    REGISTERED = "registered"
    FORGET = "forget"
    """No tensors: the server's loader lets go of those that it has mapped."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The tensors of one push."""

    index: int
    """From 0."""
    count: int
    """How many chunks the whole push has."""
    names: tuple[str, ...]
    nbytes: int
    """Bytes of tensor data, before any encoding."""
    form: Form = Form.LIST


class PushWish(NamedTuple):
    """What a policy and the servers ask of a plan."""

    strategy: Strategy = Strategy.AUTO
    chunk_bytes_max: int = 1 << 30
    """A push of bytes carries no more than this, or one larger tensor."""
    bucket_bytes: int = 512 << 20
    """No buffer is larger: a larger tensor is not packed."""
    buffers: int = 2
    """`bucket`: how many a server reads in turn."""
    loader: bool = False
    """Every server was started with `refitfsm.server.loader`."""
    targets: tuple[Target, ...] = ()
    """The servers, as far as they are known."""

    @property
    def readers(self) -> int:
        """How many servers there are: each that reads a bucket needs buffers of its own."""
        return max(1, len(self.targets))


class Layout(NamedTuple):
    """How a source's tensors lie, and what memory there is beside them."""

    one_allocation: bool = False
    """In each place, all are views of one allocation and of one number format."""
    free_bytes: int | None = None
    """Of the place that has least; None where that is not known."""


class PushPlan(NamedTuple):
    """The pushes of one refit."""

    strategy: Strategy
    chunks: tuple[ChunkPlan, ...]
    buffer_bytes: tuple[int, ...] = ()
    """Memory that the sender needs beside the weights, a buffer each."""

    @property
    def sender_bytes(self) -> int:
        """All buffers together."""
        return sum(self.buffer_bytes)


def plan_list(manifest: Manifest, chunk_bytes_max: int) -> PushPlan:
    """Pushes of tensors as they lie, each of at most `chunk_bytes_max` bytes, or of one larger tensor.

    The order of the tensors is kept and each is in exactly one chunk. An empty manifest has no chunks.

    Raises:
        WeightsError: the limit is not positive.
    """
    _check_limit("chunk_bytes_max", chunk_bytes_max)
    return PushPlan(Strategy.LIST, _numbered(_cut(manifest.tensors, chunk_bytes_max), Form.LIST))


def plan_tensors(manifest: Manifest) -> PushPlan:
    """One push for each tensor."""
    return PushPlan(Strategy.TENSOR, _numbered(([spec] for spec in manifest.tensors), Form.LIST))


def plan_buckets(manifest: Manifest, bucket_bytes: int, buffers: int = 2) -> PushPlan:
    """Tensors packed into buckets of one number format each, and those that fit none as they lie, last.

    A byte bucket has offsets that differ between SGLang's versions; one of a single format is read alike
    by all (from 0.5.2 on). There are `buffers` buffers, each of `bucket_bytes` at most.

    Raises:
        WeightsError: a limit is not positive.
    """
    _check_limit("bucket_bytes", bucket_bytes)
    _check_limit("number of buffers", buffers)
    return _packed(manifest, Strategy.BUCKET, bucket_bytes, bucket_bytes + 1, buffers)


def _packed(
    manifest: Manifest, strategy: Strategy, bucket_bytes: int, whole_from: int, buffers: int
) -> PushPlan:
    small = [spec for spec in manifest.tensors if spec.nbytes < whole_from]
    large = [spec for spec in manifest.tensors if spec.nbytes >= whole_from]
    packed = [(group, Form.BUCKET) for group in _buckets(small, bucket_bytes)]
    groups = packed + ([(large, Form.LIST)] if large else [])
    largest = max((_nbytes(group) for group, _ in packed), default=0)
    return PushPlan(strategy, _numbered_forms(groups), (largest,) * min(buffers, len(packed)))


def plan_mixed(manifest: Manifest, bucket_bytes: int, small_bytes: int = SMALL_BYTES) -> PushPlan:
    """Tensors of less than `small_bytes` in buckets, then the others as they lie in one push.

    Raises:
        WeightsError: the limit is not positive.
    """
    _check_limit("bucket_bytes", bucket_bytes)
    return _packed(manifest, Strategy.MIXED, bucket_bytes, min(small_bytes, bucket_bytes + 1), 1)


def plan_registered(manifest: Manifest, *, forget: bool = False) -> PushPlan:
    """One push of everything; with `forget`, another after which servers hold none of it."""
    groups = [(list(manifest.tensors), Form.REGISTERED)] if manifest.tensors else []
    if groups and forget:
        groups.append(([], Form.FORGET))
    return PushPlan(Strategy.REGISTERED, _numbered_forms(groups))


def choose(manifest: Manifest, wish: PushWish, layout: Layout) -> Strategy:
    """What `auto` stands for, for tensors that servers can map.

    `registered` if every server has the loader. Else `list` if one handle is enough for all tensors. Else
    `mixed` if each of its buckets has `MANY_SMALL` tensors or more on average, and its buffers are known to
    be free for every server. Else `list`.

    Raises:
        WeightsError: `bucket_bytes` is not positive.
    """
    if wish.loader:
        return Strategy.REGISTERED
    if layout.one_allocation:
        return Strategy.LIST
    plan = plan_mixed(manifest, wish.bucket_bytes)
    packed = [len(chunk.names) for chunk in plan.chunks if chunk.form is Form.BUCKET]
    saves = bool(packed) and sum(packed) >= MANY_SMALL * len(packed)
    fits = layout.free_bytes is not None and plan.sender_bytes * wish.readers <= layout.free_bytes
    return Strategy.MIXED if saves and fits else Strategy.LIST


def _check_limit(name: str, limit: int) -> None:
    if limit <= 0:
        raise WeightsError(f"a {name} of {limit} is not positive: give at least 1")


def _nbytes(group: Iterable[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in group)


def _numbered(groups: Iterable[list[TensorSpec]], form: Form) -> tuple[ChunkPlan, ...]:
    return _numbered_forms([(group, form) for group in groups])


def _numbered_forms(groups: list[tuple[list[TensorSpec], Form]]) -> tuple[ChunkPlan, ...]:
    return tuple(
        ChunkPlan(index, len(groups), tuple(spec.name for spec in group), _nbytes(group), form)
        for index, (group, form) in enumerate(groups)
    )


def _buckets(specs: Iterable[TensorSpec], limit: int) -> Iterator[list[TensorSpec]]:
    by_dtype: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        by_dtype.setdefault(spec.dtype, []).append(spec)
    return chain.from_iterable(_cut(group, limit) for group in by_dtype.values())


def _cut(specs: Iterable[TensorSpec], limit: int) -> Iterator[list[TensorSpec]]:
    group: list[TensorSpec] = []
    nbytes = 0
    for spec in specs:
        if group and nbytes + spec.nbytes > limit:
            yield group
            group, nbytes = [], 0
        group.append(spec)
        nbytes += spec.nbytes
    if group:
        yield group


Planner = Callable[[Manifest, PushWish], PushPlan]

PLANNERS: dict[Strategy, Planner] = {
    Strategy.BUCKET: lambda manifest, wish: plan_buckets(manifest, wish.bucket_bytes, wish.buffers),
    Strategy.MIXED: lambda manifest, wish: plan_mixed(manifest, wish.bucket_bytes),
    Strategy.TENSOR: lambda manifest, _: plan_tensors(manifest),
    Strategy.REGISTERED: lambda manifest, _: plan_registered(manifest),
}
"""Plans that do not depend on whether bytes or handles travel."""
