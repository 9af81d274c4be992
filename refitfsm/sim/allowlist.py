"""Which globals SGLang lets a weight payload name, by release.

From 0.5.21 on the rule is a list of exact (module, name) pairs; before it is a list of modules whose
whole contents pass, less a few names.
"""

from typing import Final

_TENSORS: Final = "BFloat16 Byte Char Double Float Half Int Long Short"
_DTYPES: Final = (
    "bcomplex32 bfloat16 bit bits16 bits1x8 bits2x4 bits4x2 bits8 bool cdouble cfloat chalf complex128 "
    "complex32 complex64 double float float16 float32 float4_e2m1fn_x2 float64 float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu half int int1 int16 int2 int3 int32 int4 "
    "int5 int6 int64 int7 int8 long qint32 qint8 quint2x4 quint4x2 quint8 short uint1 uint16 uint2 uint3 "
    "uint32 uint4 uint5 uint6 uint64 uint7 uint8"
)
_STORAGES: Final = "BFloat16 Bool Byte Char ComplexDouble ComplexFloat Double Float Half Int Long Short"


def _with(suffix: str, names: str) -> list[str]:
    return [name + suffix for name in names.split()]


_NAMES: Final[dict[str, list[str]]] = {
    "builtins": _with(
        "", "bool bytearray bytes complex dict float frozenset int list range set slice str tuple"
    ),
    "collections": ["OrderedDict", "defaultdict", "deque", "Counter"],
    "copyreg": ["__newobj__", "__newobj_ex__"],
    "functools": ["partial"],
    "itertools": ["chain", "repeat"],
    "multiprocessing.reduction": ["_rebuild_partial", "_rebuild_socket"],
    "multiprocessing.resource_sharer": ["DupFd"],
    "types": ["SimpleNamespace"],
    "_codecs": ["encode"],
    "torch": [
        *_with("", "Tensor BoolTensor Size device dtype UntypedStorage"),
        *_with("Tensor", _TENSORS),
        *_with("Storage", _STORAGES),
        *_with("Storage", "QInt32 QInt8 QUInt2x4 QUInt4x2 QUInt8"),
        *_with("_affine", "per_tensor per_channel"),
        *_with("_symmetric", "per_tensor per_channel"),
        "per_channel_affine_float_qparams",
        *_DTYPES.split(),
    ],
    "torch.cuda": [*_with("Tensor", _TENSORS), "BoolTensor", *_with("Storage", _STORAGES)],
    "torch.cuda.sparse": _with("Tensor", _TENSORS),
    "torch.sparse": _with("Tensor", _TENSORS),
    "torch.nn.parameter": ["Parameter"],
    "torch.serialization": ["_get_layout"],
    "torch._utils": _with(
        "",
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
        "_rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor "
        "_rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy "
        "_rebuild_device_tensor_from_cpu_tensor",
    ),
    "torch._tensor": ["_rebuild_from_type_v2"],
    "torch.storage": ["UntypedStorage", "_UntypedStorage", "TypedStorage", "_load_from_bytes"],
    "torch.multiprocessing.reductions": _with(
        "",
        "rebuild_tensor rebuild_meta_tensor rebuild_cuda_tensor rebuild_nested_tensor "
        "rebuild_sparse_coo_tensor rebuild_sparse_compressed_tensor rebuild_storage_fd "
        "rebuild_storage_filename rebuild_storage_empty rebuild_typed_storage rebuild_typed_storage_child",
    ),
    "torch_npu.multiprocessing.reductions": ["rebuild_npu_tensor"],
    "sglang.srt.utils.patch_torch": ["_rebuild_cuda_tensor_modified", "_rebuild_npu_tensor_modified"],
    "sglang.srt.managers.io_struct": ["GenerateReqInput", "EmbeddingReqInput"],
    "sglang.srt.disaggregation.encoder.receiver": ["EmbeddingData"],
    "sglang.srt.managers.schedule_batch": ["Modality"],
    "sglang.srt.multimodal.modality": ["Modality"],
    "sglang.srt.weight_sync.tensor_bucket": ["FlattenedTensorMetadata", "FlattenedTensorBucket"],
    "sglang.srt.model_executor.model_runner_components.weight_updater": ["LocalSerializedTensor"],
    "sglang.srt.model_executor.model_runner": ["LocalSerializedTensor"],
}

EXACT: Final = frozenset((module, name) for module, names in _NAMES.items() for name in names)
"""The pairs allowed by releases from 0.5.21 on."""

PREFIXES: Final = (
    "builtins.",
    "collections.",
    "copyreg.",
    "functools.",
    "itertools.",
    "operator.",
    "types.",
    "weakref.",
    "torch.",
    "torch._C._distributed_c10d.",
    "torch._C._distributed_fsdp.",
    "multiprocessing.resource_sharer.",
    "multiprocessing.reduction.",
    "pickletools.",
    "peft.",
    "transformers.",
    "huggingface_hub.",
    "sglang.srt.weight_sync.tensor_bucket.",
    "sglang.srt.model_executor.model_runner.",
    "sglang.srt.model_executor.model_runner_components.weight_updater.",
    "sglang.srt.layers.",
    "sglang.srt.utils.",
    "torch_npu.",
)
"""What `module + "."` must begin with in older releases."""

DENIED: Final = frozenset(
    {
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("builtins", "compile"),
        ("types", "CodeType"),
        ("types", "FunctionType"),
    }
)
"""Names that older releases refuse although their module passes."""


def refusal(module: str, name: str, *, exact: bool) -> str | None:
    """Why SGLang would not resolve this global, in the words of its exception; None where it would."""
    if exact:
        if (module, name) in EXACT:
            return None
        return f"RuntimeError: Blocked unsafe global ({module}.{name}) during pickle deserialization"
    if (module, name) not in DENIED and (module + ".").startswith(PREFIXES):
        return None
    return f"RuntimeError: Blocked unsafe class loading ({module}.{name})"
