"""Weights that a trainer holds as torch tensors, on the CPU or on one GPU."""

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from refitfsm.weights.cuda import CudaSharing, TorchCudaSharing, cuda_payload
from refitfsm.weights.dtypes import from_torch
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.payload import check_sendable, cpu_payload
from refitfsm.weights.plan import ChunkPlan, plan_chunks
from refitfsm.weights.source import RankPlace

if TYPE_CHECKING:
    import torch


class TorchSource:
    """Named torch tensors, in the order given, under the names of the Hugging Face checkpoint.

    CPU tensors travel as bytes, copied at each call of `payloads`. CUDA tensors stay where they are:
    servers on the same GPU map them, so they must keep their values until the last server has answered,
    and this process must live that long. Several names may share one storage (tied weights).

    `cuda` is the way to share GPU memory; the default is the installed torch.

    Raises:
        WeightsError: a name is given twice, a tensor cannot be sent as it is, or they are not all on one
            device.
    """

    load_format: str | None = None

    def __init__(
        self,
        named_tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        *,
        cuda: CudaSharing | None = None,
    ) -> None:
        pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        held = [(name, tensor, _spec(name, tensor)) for name, tensor in pairs]
        self.manifest = Manifest(tuple(spec for _, _, spec in held))
        self._tensors: dict[str, torch.Tensor] = {name: tensor for name, tensor, _ in held}
        self._cuda: CudaSharing = cuda or TorchCudaSharing()
        self._gpu = _one_gpu(self._tensors)
        self._closed = False

    def chunks(self, chunk_bytes_max: int) -> tuple[ChunkPlan, ...]:
        """See `WeightSource.chunks`. For CUDA tensors, fewer chunks are faster: no bytes travel."""
        return plan_chunks(self.manifest, chunk_bytes_max)

    def payloads(self, chunk: ChunkPlan, ranks: tuple[RankPlace, ...]) -> tuple[bytes, ...]:
        """See `WeightSource.payloads`.

        CUDA memory is shared in the state that the calling thread's current stream will leave it in. An
        entry counts one consumer, so it must be given to one server, once.

        Raises:
            WeightsError: a rank is known to be on another GPU, torch cannot share a tensor, or the source
                is closed.
        """
        if self._closed:
            raise WeightsError("the tensors of this source were let go: make a new source for each refit")
        if self._gpu is None:
            return (self._bytes_entry(chunk),) * len(ranks)
        uuid = self._cuda.uuid(self._gpu)
        for rank in ranks:
            _check_place(rank, uuid)
        return tuple(self._handles_entry(chunk, uuid) for _ in ranks)

    def _bytes_entry(self, chunk: ChunkPlan) -> bytes:
        # Not kept for the next server: the trainer may have changed the tensors since.
        by_name = self.manifest.by_name
        return cpu_payload((by_name[name], _view(self._tensors[name], by_name[name])) for name in chunk.names)

    def _handles_entry(self, chunk: ChunkPlan, uuid: str) -> bytes:
        return cuda_payload([(name, self._reduce(name)) for name in chunk.names], uuid)

    def _reduce(self, name: str) -> tuple[object, ...]:
        try:
            return self._cuda.reduce(self._tensors[name])
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise WeightsError(
                f"tensor {name!r}: torch cannot share its GPU memory ({reason}): give tensor.clone(),"
                " allocated without expandable segments or a memory saver"
            ) from error

    def close(self) -> None:
        """Let go of the tensors. Call it when the last server has answered. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._tensors.clear()
        if self._gpu is not None:
            self._cuda.collect()


# Asked by attribute, since the package imports without torch, and in an order that makes each question safe.
_REFUSALS: "tuple[tuple[Callable[[torch.Tensor], bool], str], ...]" = (
    (
        lambda t: not hasattr(t, "data_ptr"),
        "is a {type}, not a torch tensor: convert it with torch.as_tensor",
    ),
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


def _spec(name: str, tensor: "torch.Tensor") -> TensorSpec:
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


def _one_gpu(tensors: "Mapping[str, torch.Tensor]") -> int | None:
    """The index of the CUDA device that all tensors are on, or None for the CPU."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise WeightsError(
                f"tensor {name!r} is on {tensor.device} and {first[0]!r} on {first[1]}: use one device"
            )
    return None if first is None or first[1].type == "cpu" else int(first[1].index)


def _view(tensor: "torch.Tensor", spec: TensorSpec) -> memoryview:
    # The tensor is contiguous, so its elements are the bytes from here on. Needs no numpy, copies nothing.
    return memoryview((ctypes.c_char * spec.nbytes).from_address(tensor.data_ptr())).cast("B")


def _check_place(rank: RankPlace, uuid: str) -> None:
    if rank.gpu_uuid is not None and _bare(rank.gpu_uuid) != _bare(uuid):
        raise WeightsError(
            f"rank {rank.tp_rank} is on GPU {rank.gpu_uuid}, the tensors are on GPU {uuid}:"
            " send tensors of the rank's own GPU, or CPU tensors"
        )


def _bare(uuid: str) -> str:
    return uuid.strip().lower().removeprefix("gpu-")
