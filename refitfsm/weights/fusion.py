"""How an SGLang server makes each of its tensors from those it is sent.

A server joins q, k and v into one tensor, gate and up into another, and a tensor parallel rank holds only its
share. From the names that a server reports, and the names and shapes of what was sent, this derives a recipe
for each of the server's tensors. Nothing is computed here.

What it knows: decoder models whose layers are named as Llama's are, dense or of experts, not quantised, under
plain tensor parallelism (no data parallel attention, no expert parallelism). A tensor that is not certain is
unknown, since a guess would accuse a server that is right.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec


class Heads(NamedTuple):
    """The attention heads of a model, by its config."""

    query: int
    """`num_attention_heads`."""
    key_value: int
    """`num_key_value_heads`."""


class Server(NamedTuple):
    """What decides how a rank of a server lays its tensors out."""

    tp_rank: int = 0
    tp_size: int = 1
    heads: Heads | None = None
    """Without them, q, k and v of a tensor parallel rank are unknown unless all three are of one size."""
    on_cpu: bool = False
    """SGLang pads more there than on a GPU. Its kernels that pack weights are not foreseen."""
    experts_as_loaded: bool = False
    """The server's MoE runner keeps experts as they were loaded: gate above up, not swapped nor shuffled.

    SGLang's triton runner does, unless an option reorders them; the names do not say which runner it is."""


ONE_RANK = Server()


class Cut(NamedTuple):
    """The part of a tensor from `start` up to `stop`, counted along dimension `dim`."""

    dim: int
    start: int
    stop: int


class Piece(NamedTuple):
    """A tensor that was sent, or a part of it."""

    name: str
    cut: Cut | None = None


class Recipe(NamedTuple):
    """One tensor of a server: the pieces, one below the other, and rows of zeros below them."""

    pieces: tuple[Piece, ...]
    zero_rows: int = 0


class Derivation(NamedTuple):
    """What is known of a server's tensors."""

    recipes: Mapping[str, Recipe]
    unknown: tuple[str, ...]
    """Names without a recipe, in the order given."""


def derive(manifest: Manifest, server_names: Iterable[str], server: Server = ONE_RANK) -> Derivation:
    """A recipe for each tensor of one rank, as far as that is certain.

    Raises:
        WeightsError: there is no such rank.
    """
    rank, size = server[:2]
    if not 0 <= rank < size:
        raise WeightsError(f"there is no rank {rank} of {size}: count from 0 to tp_size - 1")
    names = tuple(server_names)
    deriver = _Deriver(manifest, names, server)
    found = {name: recipe for name in names if (recipe := deriver.recipe(name)) is not None}
    return Derivation(found, tuple(name for name in names if name not in found))


class Departures(NamedTuple):
    """Where the names that are sent are not those of a server's model, as far as that is certain."""

    missing: tuple[str, ...] = ()
    """The server's weights that are made from nothing that is sent."""
    unknown: tuple[str, ...] = ()
    """What is sent and goes into none of them."""


def departures(manifest: Manifest, server_names: Iterable[str]) -> Departures | None:
    """Compare names alone, before anything is sent. None where the names tell nothing for certain.

    So it is for a server that has other weights than those of the models known here, or most of whose weights
    seem to be missing: then SGLang may know what is sent by other names.
    """
    names = tuple(server_names)
    deriver = _Deriver(manifest, names, ONE_RANK)
    made = {name: deriver.sources(name) for name in names if _kind(name) == "weight"}
    if not made or not all(made.values()):
        return None
    missing = tuple(name for name, parts in made.items() if deriver.specs.keys().isdisjoint(parts))
    if 2 * len(missing) > len(made):
        return None
    used = {part for parts in made.values() for part in parts}
    layers = {name.split(".")[2] for name in made if _LAYER.fullmatch(name)}
    unknown = (name for name in deriver.specs if name not in used and deriver.is_of_layer(name, layers))
    return Departures(missing, tuple(unknown))


_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_VOCABULARY_ROWS = 64
"""Embeddings are padded to a multiple of this, and to shares of one size; with zeros."""
_CPU_ROWS = 32
"""On the CPU a rank's share of an MLP is padded to a multiple of this."""

_LAYER = re.compile(r"model\.layers\.\d+\.(.+)\.[^.]+")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.[^.]+\.weight")


class _Deriver:
    """Derives recipes one by one. A rule is given the specs of what a tensor is made from."""

    def __init__(self, manifest: Manifest, server_names: Sequence[str], server: Server) -> None:
        self.server = server
        self.specs = manifest.by_name
        self.reported = frozenset(server_names)
        layers = [found[1] for name in self.specs if (found := _LAYER.fullmatch(name))]
        self.is_known = all(re.sub(r"\.\d+\.", ".#.", path) in _SENT for path in layers)
        self.pads_oddly = "pre_feedforward_layernorm" in layers  # some of Gemma's embeddings are not padded
        both = (*self.specs, *server_names)
        self.quantised = {_module(name) for name in both if any(word in _kind(name) for word in _QUANTISED)}
        self.experts: dict[str, set[int]] = {}
        for name in self.specs:
            if found := _EXPERT.fullmatch(name):
                self.experts.setdefault(found[1], set()).add(int(found[2]))

    def recipe(self, name: str) -> Recipe | None:
        """How the server's tensor `name` is made."""
        sources, rule = self._how(name)
        specs = [self.specs[source] for source in sources if source in self.specs]
        if rule is None or not self.is_known or not specs or len(specs) < len(sources):
            return None
        alike = len({(spec.dtype, spec.shape[1:]) for spec in specs}) == 1 and specs[0].dtype in _FLOATS
        sound = alike and specs[0].shape and self.quantised.isdisjoint(map(_module, (name, *sources)))
        return rule(self, specs) if sound else None

    def sources(self, name: str) -> tuple[str, ...]:
        """What the server's weight `name` is made from, sent or not; nothing if that is not known."""
        layer = _LAYER.fullmatch(name)
        path = layer[1] if layer else _module(name)
        if path not in _SAME and path not in _FUSED:
            return ()
        return tuple(self._how(name)[0]) or (name,)

    def is_of_layer(self, name: str, layers: Container[str]) -> bool:
        """Whether a name that is sent must be of use to a server with these layers.

        Not all is: experts may be joined with others, and whole layers be for another model beside this one.
        """
        layer = _LAYER.fullmatch(name)
        known = layer is not None and layer[1] in _SENT and "expert" not in layer[1]
        return known and _kind(name) == "weight" and name.split(".")[2] in layers

    def _how(self, name: str) -> "tuple[Sequence[str], _Rule | None]":
        """The names that a tensor is made from, and the rule."""
        module = _module(name)
        layer = _LAYER.fullmatch(name)
        path = layer[1] if layer else module
        if path in _EXPERTS:
            return self._how_experts(module, path, _kind(name))
        if _kind(name) not in ("weight", "bias"):
            return (), None
        if name in self.specs:
            return (name,), _SAME.get(path)
        if name == "lm_head.weight":  # tied
            return ("model.embed_tokens.weight",), _Deriver.vocabulary
        parts, rule = _FUSED.get(path, ((), None))
        return [f"{_module(module)}.{part}.{_kind(name)}" for part in parts], rule

    def _how_experts(self, module: str, path: str, kind: str) -> "tuple[Sequence[str], _Rule | None]":
        gate, up, down = _EXPERTS[path]
        numbers = sorted(self.experts.get(module, ()))
        shared = f"{_module(module)}.shared_experts"
        sent, kept = (
            f"{shared}.gate_proj.weight" in self.specs,
            f"{shared}.gate_up_proj.weight" in self.reported,
        )
        if not self.server.experts_as_loaded or numbers != list(range(len(numbers))) or (sent and not kept):
            return (), None  # in the last case the shared experts are among the others
        match kind:
            case "w13_weight":
                return [
                    f"{module}.{at}.{part}.weight" for at in numbers for part in (gate, up)
                ], _Deriver.rows
            case "w2_weight":
                return [f"{module}.{at}.{down}.weight" for at in numbers], _Deriver.columns
        return (), None

    def whole(self, specs: Sequence[TensorSpec]) -> Recipe | None:
        """Every rank holds all of it."""
        return Recipe(tuple(Piece(spec.name) for spec in specs))

    def alone(self, specs: Sequence[TensorSpec]) -> Recipe | None:
        """Known where there is one rank."""
        return self.whole(specs) if self.server.tp_size == 1 else None

    def rows(self, specs: Sequence[TensorSpec]) -> Recipe | None:
        """A rank holds a band of rows of each part."""
        return None if any(self._cpu_pads(spec.shape[0]) for spec in specs) else self._shares(specs, 0)

    def columns(self, specs: Sequence[TensorSpec]) -> Recipe | None:
        """A rank holds a band of columns of each part; what has no columns, all of it."""
        if len(specs[0].shape) == 1:
            return self.whole(specs)
        is_attention = specs[0].name.endswith(".o_proj.weight")
        fits = self._cpu_fits() if is_attention else not self._cpu_pads(specs[0].shape[1])
        return self._shares(specs, 1) if fits else None

    def heads(self, specs: Sequence[TensorSpec]) -> Recipe | None:
        """A rank holds its share of the query heads, and of the others its share or, if they are few, one."""
        rank, size, heads, _, _ = self.server
        q, k, v = specs
        if size == 1:
            return self.whole(specs)
        if heads is None:
            return self._shares(specs, 0) if q.shape == k.shape == v.shape and self._cpu_fits() else None
        fits = heads.query % size == 0 and q.shape[0] % heads.query == 0 and self._cpu_fits()
        few = heads.key_value < size
        if not fits or (size % heads.key_value if few else heads.key_value % size):
            return None
        if k.shape[0] % heads.key_value or v.shape[0] % heads.key_value:
            return None
        at, shares = (rank * heads.key_value // size, heads.key_value) if few else (rank, size)
        return Recipe((_share(q, 0, rank, size), _share(k, 0, at, shares), _share(v, 0, at, shares)))

    def router(self, specs: Sequence[TensorSpec]) -> Recipe | None:
        """Every rank holds all of it. One with a correction may be kept in another number format."""
        correction = f"{_module(specs[0].name)}.e_score_correction_bias"
        return None if correction in self.specs else self.whole(specs)

    def head_norm(self, specs: Sequence[TensorSpec]) -> Recipe | None:
        """Every rank holds all of a norm over one head. One over all heads may be divided."""
        if self.server.tp_size == 1:
            return self.whole(specs)
        key = self.specs.get(f"{_module(_module(specs[0].name))}.k_proj.weight")
        if key is None or self.server.heads is None:
            return None
        return self.whole(specs) if specs[0].shape == (key.shape[0] // self.server.heads.key_value,) else None

    def vocabulary(self, specs: Sequence[TensorSpec]) -> Recipe | None:
        """Padded with rows of zeros, so that every rank holds a band of rows of one size."""
        rank, size = self.server[:2]
        (spec,) = specs
        rows = spec.shape[0]
        unit = _VOCABULARY_ROWS if _up(rows, _VOCABULARY_ROWS) % size == 0 else _VOCABULARY_ROWS * size
        share = _up(rows, unit) // size
        if share == rows or self.pads_oddly:
            return self.whole(specs) if share == rows else None
        start, stop = min(rank * share, rows), min((rank + 1) * share, rows)
        return Recipe((Piece(spec.name, Cut(0, start, stop)),), share - (stop - start))

    def _shares(self, specs: Sequence[TensorSpec], dim: int) -> Recipe | None:
        rank, size = self.server[:2]
        if size == 1:
            return self.whole(specs)
        even = not any(spec.shape[dim] % size for spec in specs)
        return Recipe(tuple(_share(spec, dim, rank, size) for spec in specs)) if even else None

    def _cpu_pads(self, length: int) -> bool:
        return self.server.on_cpu and length % (_CPU_ROWS * self.server.tp_size) != 0

    def _cpu_fits(self) -> bool:
        """Whether the CPU pads no heads."""
        _, size, heads, on_cpu, _ = self.server
        return not on_cpu or size == 1 or (heads is not None and not any(count % size for count in heads))


def _share(spec: TensorSpec, dim: int, at: int, shares: int) -> Piece:
    length = spec.shape[dim] // shares
    return Piece(spec.name, Cut(dim, at * length, (at + 1) * length))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _up(length: int, unit: int) -> int:
    return -(-length // unit) * unit


_Rule: TypeAlias = Callable[[_Deriver, Sequence[TensorSpec]], Recipe | None]

_QUANTISED = ("scale", "packed", "qweight", "zero")
_MLPS = ("mlp", "mlp.shared_expert", "mlp.shared_experts")
_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward", "post_self_attn", "post_mlp")
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
_EXPERTS = {
    "mlp.experts": ("gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe.experts": ("w1", "w3", "w2"),
}
_FUSED: dict[str, tuple[tuple[str, ...], _Rule]] = {
    "self_attn.qkv_proj": (("q_proj", "k_proj", "v_proj"), _Deriver.heads),
    "self_attn.fused_qkv_a_proj_with_mqa": (_LATENT, _Deriver.whole),
    **{f"{mlp}.gate_up_proj": (("gate_proj", "up_proj"), _Deriver.rows) for mlp in _MLPS},
}
"""What a server makes of tensors with other names."""
_SAME: dict[str, _Rule] = {
    "model.embed_tokens": _Deriver.vocabulary,
    "lm_head": _Deriver.vocabulary,
    "model.norm": _Deriver.whole,
    **{f"{norm}_layernorm": _Deriver.whole for norm in (*_NORMS, "self_attn.q_a", "self_attn.kv_a")},
    **{f"self_attn.{norm}": _Deriver.head_norm for norm in ("q_norm", "k_norm")},
    "self_attn.o_proj": _Deriver.columns,
    **{f"{mlp}.down_proj": _Deriver.columns for mlp in _MLPS},
    "mlp.gate": _Deriver.router,
    "mlp.shared_expert_gate": _Deriver.whole,
    **{
        f"self_attn.{name}": _Deriver.alone
        for name in ("qkv_proj", "q_proj", "q_b_proj", "kv_b_proj", *_LATENT)
    },
    **{f"{mlp}.{name}": _Deriver.alone for mlp in _MLPS for name in ("gate_up_proj", "up_proj")},
}
"""What a server has under the name that was sent."""
_SENT = {
    *_SAME,
    *(f"{_module(path)}.{part}" for path, (parts, _) in _FUSED.items() for part in parts),
    *(f"{path}.#.{part}" for path, parts in _EXPERTS.items() for part in parts),
    *("self_attn.rotary_emb", "block_sparse_moe.gate"),
}
"""All that may be sent for a layer of a model that is known. `#` is an expert's number."""
