"""Weights that a trainer holds as torch tensors, on the CPU or on its GPUs."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from refitfsm.weights.buckets import Buckets, require_room
from refitfsm.weights.cuda import CudaMemory
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.expectation import compare, expect
from refitfsm.weights.flat import flat_offer, in_place
from refitfsm.weights.fusion import Heads
from refitfsm.weights.handles import Replica, list_offer, replica_of, require_places, synchronize
from refitfsm.weights.host import HostMemory
from refitfsm.weights.lending import Ledger, Memory
from refitfsm.weights.local import raw_view
from refitfsm.weights.manifest import Manifest
from refitfsm.weights.offer import BytesOffer, Offer, Target
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.plan import (
    PLANNERS,
    ChunkPlan,
    Form,
    Layout,
    PushPlan,
    PushWish,
    Strategy,
    choose,
    plan_list,
    plan_registered,
)
from refitfsm.weights.proof import Comparison, RankSums
from refitfsm.weights.registered import Registrations
from refitfsm.weights.torch_checks import Module, lie, spec_of, untied

if TYPE_CHECKING:
    import torch

    NamedTensors: TypeAlias = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_ALL_BYTES = 1 << 62


class TorchSource:
    """Named torch tensors, in the order given, under the names of the Hugging Face checkpoint.

    CPU tensors travel as bytes, copied at each push; with `share_host_memory` they are moved to shared
    memory, and servers of this machine and user map them. CUDA tensors stay where they are: servers on the
    same GPU map them. What is mapped must keep its values until the refit's end, and this process must
    live that long. Several names may share one storage (tied weights).

    Keep a source for many refits: it takes the values that its tensors have at each. That is what a
    registered push needs. Of a module it reads the state anew each time, so parameters may be put elsewhere
    meanwhile; tensors that are given by themselves are the ones that are sent, whatever becomes of a module.

    `replicas` holds the same tensors on the other GPUs that tensor parallel servers use. `heads` are the
    model's attention heads, which `verify = "content"` has to know of tensor parallel servers.

    Raises:
        WeightsError: a name is given twice, a tensor cannot be sent as it is, the tensors of a replica are
            not all on one device, or replicas differ.
    """

    def __init__(
        self,
        named_tensors: "NamedTensors | Module",
        *,
        replicas: "Sequence[NamedTensors | Module]" = (),
        share_host_memory: bool = False,
        heads: Heads | None = None,
    ) -> None:
        self._heads = heads
        self._given = [_reader(given) for given in (named_tensors, *replicas)]
        self._shares = share_host_memory
        held = [read() for read in self._given]
        self.manifest = _manifest(held[0])
        for tensors in held[1:]:
            for difference in _manifest(tensors).differences(self.manifest):
                raise WeightsError(f"a replica differs from the first tensors: {difference}")
        self._by_bytes = not share_host_memory and _device(held[0]).type == "cpu"
        self._replicas = [Replica(_memory(tensors), tensors) for tensors in held]
        self._settle_in()
        self._lies = self._look()
        self._ledger = Ledger()
        names = [spec.name for spec in self.manifest.tensors]
        self._registrations = Registrations(self._replicas, names, self._ledger)
        self._lock = threading.Lock()
        self._buckets: Buckets | None = None
        self._forgets = False
        self._closed = False

    @property
    def open_leases(self) -> tuple[str, ...]:
        """The server of each push whose memory has not come back. A registration is one such push."""
        return self._ledger.open

    def forget_after_refit(self) -> None:
        """Have servers let go of a registration at the end of each refit from here on: say so of the last.

        What they had mapped is then no longer held when that refit ends. One that follows registers anew.
        """
        self._forgets = True

    def plan(self, wish: PushWish) -> PushPlan:
        """See `WeightSource.plan`. Handles carry no bytes, so there is no limit to a push of them."""
        self._require_open()
        self._read_again()
        for target in wish.targets:
            require_places(self._replicas, target)
        strategy = wish.strategy
        if self._by_bytes:
            if strategy not in (Strategy.AUTO, Strategy.LIST, Strategy.TENSOR):
                raise WeightsError(
                    f"push_strategy = {strategy} needs memory that servers can map: give CUDA tensors, or"
                    " TorchSource(..., share_host_memory=True)"
                )
            if strategy is not Strategy.TENSOR:
                return plan_list(self.manifest, wish.chunk_bytes_max)
        if strategy is Strategy.AUTO:
            layout = Layout() if wish.loader else _layout(self._replicas)
            strategy = choose(self.manifest, wish, layout)
        if strategy is not Strategy.REGISTERED and any(replica.memory.place for replica in self._replicas):
            self._registrations.require_none()
        planner = PLANNERS.get(strategy)
        plan = planner(self.manifest, wish) if planner else plan_list(self.manifest, _ALL_BYTES)
        if strategy is Strategy.REGISTERED and self._forgets:
            plan = plan_registered(self.manifest, forget=True)
        with self._lock:
            self._buckets = None  # frees the buffers of the plan before
            if plan.buffer_bytes:
                require_room(plan, self._replicas, wish.readers)
                self._buckets = Buckets(plan, self._replicas, self._ledger, wish.readers)
        return plan

    def _settle_in(self) -> None:
        for replica in self._replicas:
            if self._shares and isinstance(replica.memory, HostMemory):
                replica.memory.settle_in(replica.tensors)

    def _look(self) -> "list[dict[str, tuple[object, ...]]]":
        """How each replica's tensors lie, to see whether any is other than when it was checked."""
        return [{name: lie(t) for name, t in replica.tensors.items()} for replica in self._replicas]

    def _require_open(self) -> None:
        if self._closed:
            raise WeightsError("this source was closed: make a new one, and close it after the last refit")

    def _require_unmoved(self, names: Iterable[str]) -> None:
        for lies, replica in zip(self._lies, self._replicas, strict=True):
            for name in names:
                if lie(replica.tensors[name]) != lies[name]:
                    raise WeightsError(
                        f"tensor {name!r} was moved since the push was planned: keep it until the refit ends"
                    )

    def _read_again(self) -> None:
        """Take tensors as they are now, and check them where they are not as they were.

        Raises:
            WeightsError: they are no longer of this manifest, or not on the kind of device they were on.
        """
        for read, replica in zip(self._given, self._replicas, strict=True):
            found = read()
            if found is not replica.tensors:
                replica.tensors.clear()
                replica.tensors.update(found)
        self._settle_in()
        now = self._look()
        if now == self._lies:
            return
        for replica in self._replicas:
            for difference in _manifest(replica.tensors).differences(self.manifest):
                raise WeightsError(f"the tensors are not what they were: {difference} Make a new source.")
            if (_device(replica.tensors).type == "cpu") != (not replica.memory.place):
                raise WeightsError("the tensors are on another kind of device than before: make a new source")
        self._lies = now

    def offer(self, chunk: ChunkPlan, target: Target) -> Offer:
        """See `WeightSource.offer`."""
        self._require_open()
        self._require_unmoved(chunk.names)
        self._ledger.write_off_earlier(target)
        if self._by_bytes:
            return BytesOffer((self._bytes_entry(chunk),) * len(target.ranks))
        if chunk.form is Form.REGISTERED:
            return self._registrations.offer(target, self._lies)
        if chunk.form is Form.FORGET:
            return self._registrations.forget(target)
        if chunk.form is Form.BUCKET:
            with self._lock:
                buckets = self._buckets
            if buckets is None:
                raise WeightsError("the buffers of this plan were let go: plan again")
            return buckets.offer(chunk, target)
        return self._list(chunk, target)

    def _list(self, chunk: ChunkPlan, target: Target) -> Offer:
        chosen = [replica_of(self._replicas, rank) for rank in target.ranks]
        flats = [in_place([(name, replica.tensors[name]) for name in chunk.names]) for replica in chosen]
        whole = [flat for flat in flats if flat is not None]
        if len(chunk.names) > 1 and len(whole) == len(chosen):
            synchronize(chosen)
            return flat_offer(target, chosen, whole, self._ledger)
        return list_offer(target, self._replicas, chunk.names, self._ledger)

    def _bytes_entry(self, chunk: ChunkPlan) -> bytes:
        # Not kept for the next server: the trainer may have changed the tensors since.
        by_name, tensors = self.manifest.by_name, self._replicas[0].tensors
        return cpu_payload((by_name[name], raw_view(tensors[name], by_name[name])) for name in chunk.names)

    def compare(self, ranks: Sequence[RankSums], target: Target, *, on_cpu: bool) -> Comparison:
        """See `ProvesContent.compare`."""
        places = {place.tp_rank: place for place in target.ranks}
        differing: set[str] = set()
        unknown: set[str] = set()
        uncovered: set[str] = set()
        compared = 0
        for rank in ranks:
            replica = replica_of(self._replicas, places[rank.tp_rank])
            if on_cpu != (not replica.memory.place):
                raise WeightsError(
                    "the server's checksums are of another kind of device than these tensors are on:"
                    " use verify = checksum"
                )
            made = expect(
                replica.tensors,
                rank.checksums,
                tp_rank=rank.tp_rank,
                tp_size=len(target.ranks),
                heads=self._heads,
            )
            differing.update(compare(made, rank.checksums))
            unknown.update(made.unknown)
            uncovered.update(made.uncovered)
            compared += len(made.checksums)
        left = tuple(spec.name for spec in self.manifest.tensors if spec.name in uncovered)
        return Comparison(tuple(sorted(differing)), tuple(sorted(unknown)), compared, left)

    def head(self, name: str, count: int) -> tuple[float, ...]:
        """See `ShowsValues.head`."""
        tensors = self._replicas[0].tensors if self._replicas else {}
        if name not in tensors:
            raise WeightsError(
                f"there is no tensor {name!r} here: take names from the manifest of an open source"
            )
        tensor = tensors[name].detach()
        width = max(1, tensor[0].numel()) if tensor.dim() and len(tensor) else 1
        rows = tensor[: -(-count // width)] if tensor.dim() else tensor
        return tuple(rows.reshape(-1)[:count].double().tolist())

    def release(self) -> None:
        """See `WeightSource.release`."""
        with self._lock:
            self._buckets = None
        for replica in self._replicas:
            replica.memory.collect()

    def close(self) -> None:
        """See `WeightSource.close`. No server copies from this memory afterwards.

        One that holds a registration keeps the memory mapped until another source registers there or it
        ends: end with a refit after `forget_after_refit`.
        """
        if self._closed:
            return
        self._closed = True
        self._registrations.close()
        self.release()
        self._replicas.clear()


def _reader(given: "NamedTensors | Module") -> "Callable[[], dict[str, torch.Tensor]]":
    """How to get the tensors as they are now: a module's anew each time, others once."""
    if isinstance(given, Module):
        return lambda: untied(given)
    try:
        pairs = [(name, tensor) for name, tensor in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError) as error:
        raise WeightsError(f"give names with tensors, as a dict or in pairs: {error}") from None
    for name, _ in pairs:
        if not isinstance(name, str):
            raise WeightsError(
                f"{type(name).__name__} is no name of a tensor: give pairs of a name and a tensor"
            )
    Manifest(tuple(spec_of(name, tensor) for name, tensor in pairs))  # each name once, each tensor sendable
    held = dict(pairs)
    return lambda: held


def _manifest(tensors: "Mapping[str, torch.Tensor]") -> Manifest:
    return Manifest(tuple(spec_of(name, tensor) for name, tensor in tensors.items()))


def _device(tensors: "Mapping[str, torch.Tensor]") -> "torch.device":
    """The device that all tensors are on; the CPU for none."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise WeightsError(
                f"tensor {name!r} is on {tensor.device} and {first[0]!r} on {first[1]}: use one device, or"
                " give each device's tensors as a replica"
            )
    if first is None:
        raise WeightsError("there are no tensors to push")
    return first[1]


def _layout(replicas: Sequence[Replica]) -> Layout:
    free = [replica.memory.free_bytes() for replica in replicas]
    known = [nbytes for nbytes in free if nbytes is not None]
    return Layout(
        all(in_place(list(replica.tensors.items())) is not None for replica in replicas),
        min(known) if len(known) == len(free) else None,
    )


def _memory(tensors: "Mapping[str, torch.Tensor]") -> Memory:
    device = _device(tensors)
    return HostMemory() if device.type == "cpu" else CudaMemory(int(device.index))
