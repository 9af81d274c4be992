"""A trainer rank's part of the weights: the manifest of the whole tensors, and a chunk of them at a time.

A parameter is a plain tensor, the same on every rank, or a DTensor, of which a rank holds a part (FSDP2's
parameters are DTensors). The shape of a DTensor is that of the whole, so a manifest needs no gathering.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Self

from refitfsm.weights.dtypes import from_torch
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.payload import check_sendable

if TYPE_CHECKING:
    import torch


class Gatherer:
    """The named tensors of one rank, in the order given, under the names of the Hugging Face checkpoint.

    Work on CUDA tensors is done in the current stream of the thread that makes this, so after what the
    trainer did there. `gpu_uuid` is only to be given where the tensors are not where they seem to be.

    Raises:
        WeightsError: a name is given twice, the tensors are on more than one device, or one has no number
            format that can be sent, no elements, or as a DTensor no part on this rank.
    """

    def __init__(
        self,
        named_tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        *,
        gpu_uuid: str | None = None,
    ) -> None:
        pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        held = [(name, tensor, _whole(name, tensor)) for name, tensor in pairs]
        self.manifest = Manifest(tuple(spec for _, _, spec in held))
        self._tensors = {name: tensor for name, tensor, _ in held}
        device = _one_device(self._tensors)
        here = _Gpu.of(device) if device is not None and device.type == "cuda" else None
        self._stream = here and here.stream
        self.gpu_uuid = gpu_uuid or (here and here.uuid)
        """The GPU that the tensors are on, or None for the CPU."""
        self.begun = 0
        """Collectives begun so far: of ranks that wait for each other, the last one has begun the fewest."""

    def require(self, names: Iterable[str]) -> None:
        """Make sure that `full` could be asked for these.

        Raises:
            WeightsError: there is no such tensor.
        """
        for name in names:
            if name not in self._tensors:
                raise WeightsError(f"there is no tensor {name!r} on this rank: take names from its manifest")

    def full(self, names: Sequence[str]) -> "list[tuple[str, torch.Tensor]]":
        """The whole tensors of these names; those that were plain are passed on as they are.

        A collective: each rank must call it with the same names in the same order. What is gathered lives
        as long as the caller keeps it.

        Raises:
            WeightsError: there is no such tensor.
        """
        self.require(names)
        with self.here():
            return [(name, self._full(self._tensors[name])) for name in names]

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the calling thread works in the stream of these tensors and without gradients."""
        import torch  # noqa: PLC0415 - the package must import without torch

        with torch.no_grad(), torch.cuda.stream(self._stream):
            yield

    def _full(self, tensor: "torch.Tensor") -> "torch.Tensor":
        if not hasattr(tensor, "full_tensor"):
            return tensor
        self.begun += 1
        whole: torch.Tensor = tensor.detach().full_tensor()
        return whole.contiguous()  # a part keeps its strides when it is put together


class _Gpu(NamedTuple):
    """Where the thread that asks works."""

    stream: "torch.cuda.Stream"
    uuid: str

    @classmethod
    def of(cls, device: "torch.device") -> Self:
        import torch  # noqa: PLC0415

        return cls(torch.cuda.current_stream(device), str(torch.cuda.get_device_properties(device).uuid))


def _whole(name: str, tensor: "torch.Tensor") -> TensorSpec:
    if not hasattr(tensor, "data_ptr"):
        kind = type(tensor).__name__
        raise WeightsError(
            f"tensor {name!r} is a {kind}, not a torch tensor: convert it with torch.as_tensor"
        )
    if hasattr(tensor, "full_tensor"):
        _check_part(name, tensor)
    dtype = from_torch(tensor.dtype)
    if dtype is None:
        raise WeightsError(f"tensor {name!r} is {tensor.dtype}, which has no name in safetensors: convert it")
    spec = TensorSpec.of(name, dtype, tuple(int(size) for size in tensor.shape))
    check_sendable(spec)
    return spec


def _check_part(name: str, tensor: "torch.Tensor") -> None:
    """What only a DTensor can have; the rest is for the encoder to judge, once the tensor is whole."""
    part = tensor.to_local()
    if tensor.device_mesh.get_coordinate() is None:
        raise WeightsError(f"tensor {name!r} has no part on this rank: use a mesh of all ranks of the group")
    if hasattr(part, "__tensor_flatten__"):
        kind = type(part).__name__
        raise WeightsError(f"tensor {name!r} has parts of {kind}, made of other tensors: give plain parts")
    if part.device.type not in {"cpu", "cuda"}:
        raise WeightsError(f"tensor {name!r} is on {part.device}: load the model first, on GPU or CPU")


def _one_device(tensors: "Mapping[str, torch.Tensor]") -> "torch.device | None":
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        # A DTensor names the mesh's device without its index.
        local = tensor.to_local() if hasattr(tensor, "full_tensor") else tensor
        if first is None:
            first = (name, local.device)
        elif local.device != first[1]:
            raise WeightsError(
                f"tensor {name!r} is on {local.device} and {first[0]!r} on {first[1]}: use one device"
            )
    return None if first is None else first[1]
