"""The weights in one simulated server's memory, tensor by tensor and rank by rank."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from refitfsm.sim.content import Parameters, TensorSpec, cast, content_digest, tensor_digest

_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Checkpoint projections that live as one runtime parameter, in their order there."""
_ORDER: Final = {part: at for at, part in enumerate(_FUSED)}


class LoadError(Exception):
    """A load that raises inside the real scheduler. The message is what its log would say."""


@lru_cache(maxsize=64)
def runtime_layout(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Runtime parameter -> the checkpoint tensors it is made of, in the order they are joined.

    Shared between servers: do not change it.
    """
    layout: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        parts = name.split(".")
        at = next((at for at, part in enumerate(parts) if part in _FUSED), None)
        if at is None:
            layout[name] = [(0, name)]
        else:
            runtime = ".".join((*parts[:at], _FUSED[parts[at]], *parts[at + 1 :]))
            layout.setdefault(runtime, []).append((_ORDER[parts[at]], name))
    return {runtime: tuple(name for _, name in sorted(parts)) for runtime, parts in layout.items()}


class WeightStore:
    """Content by rank and name. A tensor is a `TensorSpec`, or None while its bytes are undefined."""

    def __init__(self, parameters: Parameters, ranks: int) -> None:
        self._shape = parameters
        self._ranks: list[dict[str, TensorSpec | None]] = [dict(parameters) for _ in range(ranks)]
        self._layout = runtime_layout(tuple(parameters))
        self._digest: str | None = None
        self._poisoned = False
        self._fresh = False

    def names(self) -> Sequence[str]:
        """Checkpoint names of all tensors."""
        return tuple(self._shape)

    def tensor(self, name: str, rank: int = 0) -> TensorSpec | None:
        """One tensor's content; None where it is undefined.

        Raises:
            KeyError: no such tensor.
        """
        return self._ranks[rank][name]

    def load(self, rank: int, name: str, spec: TensorSpec) -> bool:
        """Store one tensor on one rank, cast to the parameter's dtype; False for a name not known.

        Raises:
            LoadError: the shape is not the parameter's.
        """
        target = self._shape.get(name)
        if target is None:
            return False
        if spec.shape != target.shape:
            raise LoadError(
                f"AssertionError: Attempted to load weight (torch.Size({list(spec.shape)})) "
                f"into parameter (torch.Size({list(target.shape)}))"
            )
        self._ranks[rank][name] = cast(spec, target.dtype)
        self._fresh = False
        return True

    def load_direct(self, rank: int, name: str, spec: TensorSpec) -> None:
        """Store one runtime parameter, by its runtime name; the parts of a fused one share its bytes.

        Raises:
            LoadError: no such runtime parameter, or another shape.
        """
        parts = self._layout.get(name)
        if parts is None:
            raise LoadError(f"KeyError: {name!r}")
        if parts == (name,):
            self.load(rank, name, spec)
            return
        shape = (sum(self._shape[part].shape[0] for part in parts), *self._shape[parts[0]].shape[1:])
        if spec.shape != shape:
            raise LoadError(f"AssertionError: {spec.shape} does not fit {name} of {shape}")
        for at, part in enumerate(parts):
            target = self._shape[part]
            digest = tensor_digest(f"{spec.digest}[{at}]".encode())
            self._ranks[rank][part] = TensorSpec(target.dtype, target.shape, digest)
        self._fresh = False

    def replace(self, parameters: Parameters) -> None:
        """Store a whole checkpoint on every rank; names that it lacks keep what they have.

        Raises:
            LoadError: a shape is not the parameter's.
        """
        for rank in range(len(self._ranks)):
            for name, spec in parameters.items():
                self.load(rank, name, spec)

    def lose(self) -> None:
        """The bytes are gone: every tensor is undefined."""
        for rank in self._ranks:
            for name in rank:
                rank[name] = None
        self._fresh = False

    def scramble(self, name: str, salt: str = "noise") -> None:
        """Overwrite one tensor with noise, the same on every rank and every run.

        Raises:
            KeyError: no such tensor.
        """
        target = self._shape[name]
        for rank in self._ranks:
            rank[name] = TensorSpec(target.dtype, target.shape, tensor_digest(f"{salt}:{name}".encode()))
        self._fresh = False

    def digest(self) -> str | None:
        """`content_digest` of what is stored, or None while any of it is undefined.

        Where ranks differ it is a digest that no whole model has.
        """
        self._refresh()
        return self._digest

    def poisoned(self) -> bool:
        """Whether any tensor begins with a NaN."""
        self._refresh()
        return self._poisoned

    def checksums(self, rank: int) -> dict[str, str]:
        """Runtime name -> 16 hexadecimal digits, as /weights_checker lists them for one rank."""
        content = self._ranks[rank]
        shard = f"{rank}/{len(self._ranks)}" if len(self._ranks) > 1 else ""
        sums = {}
        for runtime, names in self._layout.items():
            parts = [spec.digest if (spec := content[name]) else "undefined" for name in names]
            sums[runtime] = tensor_digest((shard + "+".join(parts)).encode())
        return sums

    def _refresh(self) -> None:
        if self._fresh:
            return
        known = [[(name, spec) for name, spec in rank.items() if spec is not None] for rank in self._ranks]
        self._poisoned = any(spec.poisoned for pairs in known for _, spec in pairs)
        self._digest = None
        if all(len(pairs) == len(self._shape) for pairs in known):
            digests = [content_digest((name, spec.digest) for name, spec in pairs) for pairs in known]
            same = len(set(digests)) == 1
            self._digest = digests[0] if same else tensor_digest(f"ranks differ: {digests}".encode())
        self._fresh = True
