"""The loader that a server is started with: it maps a sender's weights once, and copies at a word after that.

SGLang calls `load` for each push with our `load_format`, in the scheduler's process, where any exception
kills the server. The first push of a sender registers: the model loads the tensors as ever, while each copy
that it makes from them into its parameters is recorded. Later pushes carry an order alone, and the copies
are made again from the same memory. Where that might not give what loading gives, nothing is held.
"""

import logging
import sys
import threading
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from refitfsm.server import protocol
from refitfsm.server.parts import Parts, place_of, storage_of, tensors_of
from refitfsm.server.protocol import CONTROL, CONTROL_WORDS, ORDER, Answer, Order, Reason, Status, Words

if TYPE_CHECKING:
    import torch

Named: TypeAlias = "list[tuple[str, torch.Tensor]]"
LARGE_BYTES = 256 << 10
"""From here on a contiguous copy goes by itself, as a plain copy of memory."""
_log = logging.getLogger(__name__)


def load(model: "torch.nn.Module", named_tensors: Named) -> None:
    """Carry out an order, or load an ordinary push. Raises only what the model's `load_weights` raises."""
    _desk.take(model, named_tensors)


class Desk:
    """Takes orders. It holds one registration at most, and a new one replaces it."""

    def __init__(self) -> None:
        self._held: _Registration | None = None

    def take(self, model: "torch.nn.Module", named_tensors: Named) -> None:
        """See `load`."""
        if not named_tensors or not _is_called(named_tensors[0], ORDER):
            model.load_weights(named_tensors)
            return
        weights = [pair for pair in named_tensors if not _is_called(pair, ORDER, CONTROL)]
        order, control = _order_of(named_tensors), _control_of(named_tensors)
        if order is not None and order.kind != "register" and len(named_tensors) == 1:
            with _kept_alive("an order failed"):
                self._carry_out(model, order)
        elif order is not None and order.kind == "register" and control is not None and weights:
            self._register(model, weights, order, control)
        elif weights:
            model.load_weights(weights)

    def _register(
        self, model: "torch.nn.Module", weights: Named, order: Order, control: "torch.Tensor"
    ) -> None:
        held, self._held = self._held, None
        if held is None or not (order.is_of(held.order) and order.seq == held.order.seq):
            held = _Registration(order, order.sender_is_seen(), control)
        # Else a second model of this process, such as a draft model, takes the same push.
        block = _Block(control, order)
        if block.words.is_revoked:
            with _kept_alive("no answer could be given"):
                block.answer(Status.VOID, Reason.REVOKED)
            return
        recording = _Recording()
        with ExitStack() as stack:
            with _kept_alive("the loading cannot be recorded"):
                recording.begin(model, [tensor for _, tensor in weights], stack)
            model.load_weights(weights)
        with _kept_alive("the loading was not understood"):
            plan = recording.plan(model, order.seq)
            status = Status.LOADED if plan is None else Status.REGISTERED
            if block.answer(status, recording.reason, plan) is Status.REGISTERED and plan is not None:
                held.plans[model] = plan
                self._held = held

    def _carry_out(self, model: "torch.nn.Module", order: Order) -> None:
        held = self._held
        if held is None or not order.is_of(held.order):
            return
        self._held = None  # until all has gone well
        if held.sender_was_seen and not held.order.sender_is_seen():
            return
        block, plan = _Block(held.control, order), held.plans.get(model)
        if not block.words.is_sound:  # something else lies there now
            return
        if order.kind == "forget":
            block.answer(Status.VOID, Reason.FORGOTTEN)
        elif block.words.is_revoked:
            block.answer(Status.VOID, Reason.REVOKED)
        elif plan is None:
            block.answer(Status.VOID, Reason.OTHER_MODEL)
        elif not plan.fits():
            block.answer(Status.VOID, Reason.PARAMETERS_MOVED)
        else:
            if order.seq > plan.seq:  # else it was carried out before
                plan.replay()
                plan.seq = order.seq
                block.answer(Status.REPLAYED, Reason.NONE, plan)
            self._held = held


_desk = Desk()


@dataclass
class _Registration:
    order: Order
    sender_was_seen: bool
    """False where the sender's processes cannot be seen from here: then they are not asked for later."""
    control: "torch.Tensor"
    plans: "WeakKeyDictionary[torch.nn.Module, _Plan]" = field(default_factory=WeakKeyDictionary)


class _Block:
    """A control block, when an order came."""

    def __init__(self, control: "torch.Tensor", order: Order) -> None:
        self._control, self._seq = control, order.seq
        self.words = Words.read(control.tolist(), order.seq)

    def answer(self, status: Status, reason: Reason, plan: "_Plan | None" = None) -> Status:
        """Write, once all copies are done. Gives what was written: another model's answer may be worse."""
        import torch  # noqa: PLC0415 - the package must import without torch

        said = Answer(status, reason) if plan is None else Answer(status, reason, plan.copies, plan.nbytes)
        said, control = self.words.together(said), self._control
        with torch.inference_mode():
            if control.is_cuda:
                torch.cuda.synchronize(control.device)
            control[protocol.STATUS_AT : protocol.BYTES_AT + 1].copy_(torch.tensor(said, dtype=torch.int64))
            control[protocol.SEQ_AT] = self._seq
            control.tolist()  # waits until it is written
        return Status(said.status)


class _Pair(NamedTuple):
    to: "torch.Tensor"
    of: "torch.Tensor"


class _Recording:
    """What a model does with the tensors that it loads, seen operation by operation."""

    def __init__(self) -> None:
        self.reason = Reason.NOT_FOLLOWED  # why it cannot be repeated
        self._pairs: list[_Pair] = []
        self._read: set[int] = set()
        self._threads = False

    def begin(self, model: "torch.nn.Module", sources: "list[torch.Tensor]", stack: ExitStack) -> None:
        """Record from now until the stack is left."""
        tensors = tensors_of(model)
        # Storages are held, so that no other gets the identity of one.
        self._sources = {storage_of(tensor): tensor.untyped_storage() for tensor in sources}
        self._targets = {storage_of(tensor): tensor.untyped_storage() for tensor in tensors}
        self._starts = sorted({tensor.data_ptr() for tensor in sources if tensor.numel()})
        self._places = [place_of(tensor) for tensor in tensors]
        if not _are_mapped(sources):
            self.reason = Reason.NOT_MAPPED
            return
        stack.callback(threading.setprofile, threading.getprofile())
        threading.setprofile(self._see_thread)
        stack.enter_context(_watch()(self._see))
        self.reason = Reason.NONE

    def plan(self, model: "torch.nn.Module", seq: int) -> "_Plan | None":
        """How to load again; None, and a `reason`, where that cannot be said."""
        if self.reason is Reason.NONE:
            self.reason = self._verdict(model)
        return _Plan(model, self._pairs, seq) if self.reason is Reason.NONE else None

    def _verdict(self, model: "torch.nn.Module") -> Reason:
        if self._threads:
            return Reason.LOADED_IN_ANOTHER_THREAD
        if self._places != [place_of(tensor) for tensor in tensors_of(model)]:
            return Reason.WRITTEN_OTHERWISE
        copied = {bisect_right(self._starts, address) for address in self._read}
        return Reason.NONE if len(copied) == len(self._starts) else Reason.SOURCE_NOT_COPIED

    def _see_thread(self, *_: object) -> None:
        """Called in each thread that starts meanwhile: its operations are not shown to `_see`."""
        sys.setprofile(None)
        self._threads = True

    def _see(self, operation: Any, given: Any, result: object) -> None:
        if self.reason is Reason.NONE:
            self.reason = Reason.NOT_FOLLOWED
            with _kept_alive("an operation was not understood"):
                self.reason = self._judge(operation, given, result)

    def _judge(self, operation: Any, given: Any, result: object) -> Reason:
        import torch  # noqa: PLC0415

        aten, (args, _) = torch.ops.aten, given
        if operation is aten.copy_.default:
            return self._copy(*args[:2])
        if operation is aten._foreach_copy_.default:
            return max(map(self._copy, args[0], args[1]))
        if operation is aten.fill_.Scalar or operation is aten.zero_.default:
            return self._fill(*args)
        touched, made = _keys_in(given), _keys_in(result)
        pushed, own = touched & self._sources.keys(), touched & self._targets.keys()
        writes = operation._schema.is_mutable  # noqa: SLF001 - it is public in all but its name
        is_view = made and made <= touched and not writes
        if is_view or not (pushed or own):
            return Reason.NONE
        if pushed:
            return Reason.SOURCES_CONVERTED
        return Reason.WRITTEN_OTHERWISE if writes else Reason.PARAMETERS_READ

    def _fill(self, to: "torch.Tensor", value: float = 0) -> Reason:
        """Padding. It is repeated as well: memory that was released in between has lost it."""
        if storage_of(to) in self._targets and to.numel():
            self._pairs.append(_Pair(to, to.new_full((), value).expand(to.shape)))
        return Reason.SOURCES_CONVERTED if storage_of(to) in self._sources else Reason.NONE

    def _copy(self, to: "torch.Tensor", of: "torch.Tensor") -> Reason:
        into, out_of = storage_of(to), storage_of(of)
        if to.numel() == 0:
            return Reason.NONE
        plain = not any(tensor.is_neg() or tensor.is_conj() for tensor in (to, of))
        if into in self._targets and out_of in self._sources and plain:
            self._pairs.append(_Pair(to, of.expand(to.shape)))
            self._read.add(of.data_ptr())
            return Reason.NONE
        if into in self._sources or out_of in self._sources:
            return Reason.SOURCES_CONVERTED
        if into in self._targets:
            return Reason.WRITTEN_OTHERWISE
        return Reason.PARAMETERS_READ if out_of in self._targets else Reason.NONE


class _Plan:
    """The copies that load a model, ready to be made again."""

    def __init__(self, model: "torch.nn.Module", pairs: list[_Pair], seq: int) -> None:
        self.seq = seq  # of the order that was carried out last
        written = {storage_of(pair.to) for pair in pairs}
        self._parts = Parts(model)
        self._places = [
            (tensor, place_of(tensor)) for tensor in tensors_of(model) if storage_of(tensor) in written
        ]
        self._alone, self._groups = _arranged([_Pair(to.detach(), of.detach()) for to, of in pairs])
        self.copies = len(self._alone) + sum(len(to) for to, _ in self._groups)
        self.nbytes = sum(pair.to.nbytes for pair in pairs)

    def fits(self) -> bool:
        """Whether all that was copied into still is the model's, where it was and as it was."""
        return self._parts.are_the_same() and all(place_of(tensor) == was for tensor, was in self._places)

    def replay(self) -> None:
        """Make all copies; on a GPU this returns before they are done."""
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            for to, of in self._alone:
                to.copy_(of, non_blocking=True)
            for tos, ofs in self._groups:
                torch._foreach_copy_(tos, ofs, non_blocking=True)


def _arranged(pairs: list[_Pair]) -> tuple[list[_Pair], list[tuple[list[Any], list[Any]]]]:
    """The copies to make one by one, in this order, and those to make in groups.

    Copies into one storage keep their order where they may overlap; all others can go in any.
    """
    alone: list[_Pair] = []
    groups: dict[object, tuple[list[Any], list[Any]]] = {}
    for _, same in groupby(
        sorted(pairs, key=lambda pair: storage_of(pair.to)), key=lambda pair: storage_of(pair.to)
    ):
        into_one = list(same)
        if _may_overlap(into_one):
            alone += into_one
            continue
        for to, of in _joined(into_one):
            flat = to.is_contiguous() and of.is_contiguous()
            if flat and to.nbytes >= LARGE_BYTES:
                alone.append(_Pair(to, of))
                continue
            kind = (flat, to.dtype, of.dtype, to.device, of.device)  # an odd one costs all their one kernel
            for side, tensor in zip(groups.setdefault(kind, ([], [])), (to, of), strict=True):
                side.append(tensor)
    return alone, list(groups.values())


def _may_overlap(pairs: list[_Pair]) -> bool:
    spans = []
    for to, _ in pairs:
        reach = sum((size - 1) * stride for size, stride in zip(to.shape, to.stride(), strict=True))
        spans.append((to.data_ptr(), to.data_ptr() + (reach + 1) * to.element_size()))
    return any(end > begin for (_, end), (begin, _) in pairwise(sorted(spans)))


def _joined(pairs: list[_Pair]) -> Iterator[_Pair]:
    """The same copies; those of memory that is adjacent on both sides are made one."""
    runs: list[list[_Pair]] = []
    for pair in sorted(pairs, key=lambda pair: pair.to.data_ptr()):
        if runs and all(_follows(before, after) for before, after in zip(runs[-1][-1], pair, strict=True)):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    for run in runs:
        size = (sum(pair.to.numel() for pair in run),)
        one = (side.as_strided(size, (1,), side.storage_offset()) for side in run[0])
        yield _Pair(*one) if len(run) > 1 else run[0]


def _follows(before: "torch.Tensor", after: "torch.Tensor") -> bool:
    adjacent = after.data_ptr() == before.data_ptr() + before.nbytes and storage_of(after) == storage_of(
        before
    )
    return adjacent and before.dtype == after.dtype and before.is_contiguous() and after.is_contiguous()


def _is_called(pair: tuple[object, object], *names: str) -> bool:
    return isinstance(pair[0], str) and pair[0] in names


def _order_of(named_tensors: Named) -> Order | None:
    with _kept_alive("an order could not be read"):
        tensor = named_tensors[0][1]
        short = tensor.dim() == 1 and tensor.numel() <= protocol.ORDER_BYTES_MAX
        if short and str(tensor.dtype) == "torch.uint8":
            return Order.decode(bytes(tensor.tolist()))
    return None


def _control_of(named_tensors: Named) -> "torch.Tensor | None":
    with _kept_alive("a control block could not be read"):
        tensor = dict(named_tensors[1:2]).get(CONTROL)
        if tensor is not None and (*tensor.shape, str(tensor.dtype)) == (CONTROL_WORDS, "torch.int64"):
            fits = tensor.is_contiguous() and _are_mapped([tensor])
            return tensor if fits and Words.read(tensor.tolist(), 0).is_sound else None
    return None


def _are_mapped(tensors: "list[torch.Tensor]") -> bool:
    """Whether all are another process's memory. What was moved to the server's device is a copy of it."""
    from torch.multiprocessing.reductions import shared_cache  # noqa: PLC0415

    mapped = {reference.cdata for reference in list(shared_cache.values())}
    return all(storage_of(tensor) in mapped for tensor in tensors)


def _keys_in(values: object) -> set[int]:
    import torch  # noqa: PLC0415
    from torch.utils._pytree import tree_leaves  # noqa: PLC0415

    return {storage_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


@cache  # a class is freed late, and what it refers to with it
def _watch() -> Callable[[Callable[[object, object, object], None]], AbstractContextManager[object]]:
    """Inside, every operation of this thread on tensors is shown: itself, its arguments, its result."""
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self, show: Callable[[object, object, object], None]) -> None:
            super().__init__()
            self._show = show

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
            self._show(func, (args, kwargs), result := func(*args, **(kwargs or {})))
            return result

    return Watch


@contextmanager
def _kept_alive(trouble: str) -> Iterator[None]:
    """Log an exception instead of letting it end the server. The sender sees that there is no answer."""
    try:
        yield
    except Exception:  # noqa: BLE001 - any of them ends the server
        # As text: whoever kept the exception would keep the sender's memory mapped.
        _log.warning("%s\n%s", trouble, traceback.format_exc())
