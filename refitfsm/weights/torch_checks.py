"""Whether a torch tensor can be sent as it lies in memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from refitfsm.weights.dtypes import from_torch
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.payload import check_sendable

if TYPE_CHECKING:
    import torch


def _is_lazy(tensor: "torch.Tensor") -> bool:
    """Whether it is a parameter of one of torch's lazy modules, which makes it at its first run."""
    return hasattr(tensor, "materialize")


# Asked by attribute, since the package imports without torch, and in an order that makes each question safe.
_REFUSALS: "tuple[tuple[Callable[[torch.Tensor], bool], str], ...]" = (
    (
        lambda t: not hasattr(t, "data_ptr"),
        "is a {type}, not a torch tensor: convert it with torch.as_tensor",
    ),
    (_is_lazy, "has no shape yet: run the model once, or load its checkpoint"),
    (lambda t: hasattr(t, "full_tensor"), "is a DTensor, here only in part: give tensor.full_tensor()"),
    (lambda t: hasattr(t, "__tensor_flatten__"), "is a {type}, made of other tensors: give a plain tensor"),
    (lambda t: t.is_meta, "is on the meta device and has no values: load the model first"),
    (lambda t: t.is_nested, "is a nested tensor: give plain ones, one by one"),
    (lambda t: str(t.layout) != "torch.strided", "has layout {layout}: give tensor.to_dense()"),
    (lambda t: t.is_quantized, "is quantised by torch: give tensor.dequantize()"),
    (
        lambda t: t.is_conj() or t.is_neg(),
        "is a lazy conjugate or negation: give resolve_conj().resolve_neg()",
    ),
    (lambda t: t.device.type not in {"cpu", "cuda"}, "is on {device}: give tensor.cpu()"),
)


def spec_of(name: str, tensor: "torch.Tensor") -> TensorSpec:
    """The spec of a tensor whose memory is simply its elements, in row-major order.

    Raises:
        WeightsError: it is not; the message says why, and what to give instead.
    """
    problem = _problem(tensor)
    if problem is not None:
        raise WeightsError(f"tensor {name!r} {problem}")
    dtype = from_torch(tensor.dtype)
    if dtype is None:
        raise WeightsError(f"tensor {name!r} is {tensor.dtype}, which has no name in safetensors: convert it")
    spec = TensorSpec.of(name, dtype, tuple(int(size) for size in tensor.shape))
    check_sendable(spec)
    if not tensor.is_contiguous():
        raise WeightsError(f"tensor {name!r} is not contiguous: give tensor.contiguous()")
    if tensor.data_ptr() == 0:
        raise WeightsError(f"tensor {name!r} has given up its memory: bring its values back first")
    return spec


def _problem(tensor: "torch.Tensor") -> str | None:
    """Why a tensor's memory is not simply its elements, with the remedy."""
    for refused, text in _REFUSALS:
        if refused(tensor):
            return text.format(
                type=type(tensor).__name__,
                layout=getattr(tensor, "layout", None),
                device=getattr(tensor, "device", None),
            )
    return None


_EXTRA_STATE = "_extra_state"
"""How torch ends the name of what a module saves beside its tensors."""


@runtime_checkable
class Module(Protocol):
    """A `torch.nn.Module`, as far as it matters here."""

    def state_dict(self) -> "dict[str, torch.Tensor]":
        """Its parameters and persistent buffers by name."""
        ...


def untied(module: Module) -> "dict[str, torch.Tensor]":
    """A module's state under the names of its checkpoint: tied weights once, as Hugging Face saves them.

    What modules save beside their tensors (`get_extra_state`) is no part of a checkpoint, and left out.

    Raises:
        WeightsError: it is a class, or its state is not made of tensors.
    """
    if isinstance(module, type):
        raise WeightsError(f"{module.__name__} is a class: give a module that was made of it")
    state = {name: held for name, held in module.state_dict().items() if not name.endswith(_EXTRA_STATE)}
    for name, tensor in state.items():
        if not hasattr(tensor, "data_ptr"):
            kind = type(module).__name__
            raise WeightsError(f"a {kind} is no module: {name!r} of its state is no tensor; give the model's")
    tied = set(getattr(module, "_tied_weights_keys", None) or ())
    made = {name: tensor for name, tensor in state.items() if not _is_lazy(tensor)}
    places = {tensor.data_ptr() for name, tensor in made.items() if name not in tied}
    twice = {name for name, tensor in made.items() if name in tied and tensor.data_ptr() in places}
    return {name: tensor for name, tensor in state.items() if name not in twice}


def lie(tensor: "torch.Tensor") -> tuple[object, ...]:
    """Device, address, shape, strides and number format: while they stay, so does what a mapping shows."""
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
