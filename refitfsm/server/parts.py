"""What a model in a server consists of, and whether it still does. A push waits for each look at it."""

from operator import is_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_KINDS = ("_parameters", "_buffers", "_modules")


class Parts:
    """The modules, parameters and buffers of a model, as they are now."""

    def __init__(self, model: "torch.nn.Module") -> None:
        # By its dictionaries, which are compared in C. None of them keeps the model itself alive.
        owners = [vars(module) for module in model.modules()]
        self._owned = [(owner, kind, owner[kind]) for owner in owners for kind in _KINDS]
        held: list[dict[str, Any]] = [each for _, _, each in self._owned]
        self._empty = [each for each in held if not each]
        self._full = [(each, list(each.values())) for each in held if each]

    def are_the_same(self) -> bool:
        """Whether none was added, removed or replaced by another since."""
        if any(self._empty) or any(owner[kind] is not each for owner, kind, each in self._owned):
            return False
        return all(len(each) == len(was) and all(map(is_, each.values(), was)) for each, was in self._full)


def tensors_of(model: "torch.nn.Module") -> "list[torch.Tensor]":
    """All parameters and buffers, each once."""
    return [*model.parameters(), *model.buffers()]


def storage_of(tensor: "torch.Tensor") -> int:
    """The identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch's own name for it


def place_of(tensor: "torch.Tensor") -> tuple[object, ...]:
    """Where and how a tensor lies."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
