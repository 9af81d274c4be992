"""What users give to be pushed, as sources; and whether it is the servers' model."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from refitfsm.errors import ConfigError
from refitfsm.model.values import ServerView
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource, WeightSource


@runtime_checkable
class Module(Protocol):
    """A `torch.nn.Module`, as far as it matters here."""

    def state_dict(self) -> Mapping[str, object]:
        """Its parameters and persistent buffers by name."""
        ...


Weights = WeightSource | str | Path | Mapping[str, object] | Iterable[tuple[str, object]] | Module
"""What can be pushed: a source, a safetensors folder, a state dict of torch tensors, such pairs of names and
tensors, or a module with the names of its checkpoint."""


def as_source(weights: Weights) -> WeightSource:
    """A source of what was given; itself if it is one.

    Raises:
        WeightsError: it cannot be read or sent.
    """
    if isinstance(weights, str | Path):
        return CheckpointSource(CheckpointFolder.open(Path(weights)))
    if isinstance(weights, WeightSource):
        return weights
    from refitfsm.weights.torch_source import TorchSource  # noqa: PLC0415 - torch is optional

    if isinstance(weights, Module):
        return TorchSource(untied(weights))
    if isinstance(weights, Iterable):
        return TorchSource(weights)
    kind = type(weights).__name__  # type: ignore[unreachable]  # not for whoever uses no checker
    raise WeightsError(
        f"{kind} is nothing to push: give a folder, a state dict, pairs, a module or a weight source"
    )


def untied(module: Module) -> dict[str, object]:
    """A module's state under the names of its checkpoint: tied weights once, as Hugging Face saves them."""
    state = module.state_dict()
    tied = set(getattr(module, "_tied_weights_keys", None) or ())
    places = {_place(tensor) for name, tensor in state.items() if name not in tied}
    return {
        name: tensor for name, tensor in state.items() if name not in tied or _place(tensor) not in places
    }


def _place(tensor: object) -> object:
    """Where a tensor's elements are; a thing that is no tensor is like no other."""
    find = getattr(tensor, "data_ptr", None)
    return find() if find else id(tensor)


def server_manifest(views: Iterable[ServerView]) -> Manifest | None:
    """What the servers' model consists of, by the checkpoint that they were started from.

    None where this machine cannot read it: the first weights pushed are then what later ones are
    compared with.
    """
    for view in views:
        folder = Path(view.capabilities.model_path)
        if view.capabilities.model_path and folder.is_dir():
            try:
                with CheckpointFolder.open(folder) as checkpoint:
                    return checkpoint.manifest
            except WeightsError:
                return None  # no safetensors there, say dummy weights: nothing to compare with
    return None


def check_manifest(manifest: Manifest, expected: Manifest) -> None:
    """Compare weights with the servers' model, before any byte is sent.

    Raises:
        ConfigError: a tensor is missing, unknown, or of another shape or number format.
    """
    differences = manifest.differences(expected)
    if differences:
        shown = " ".join(map(str, differences[:3]))
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ConfigError(
            f"the weights are not the servers' model: {shown}{more} Give weights of the model that the"
            " servers were started from; no weights were sent."
        )
