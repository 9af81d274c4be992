"""How a server's tensors are made from those it is sent: what is certain, and what is left unknown."""

from collections.abc import Iterable, Mapping

import pytest

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.fusion import ONE_RANK, Cut, Heads, Piece, Recipe, Server, derive
from refitfsm.weights.manifest import Manifest, TensorSpec

LAYER = "model.layers.0"
Q, K, V = (f"{LAYER}.self_attn.{part}_proj" for part in "qkv")
QKV, GATE_UP = f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.mlp.gate_up_proj"
GATE, UP = f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"
HEAD_SIZE, HIDDEN, MLP, VOCABULARY = 16, 64, 192, 512
FOUR = Heads(4, 2)

Shapes = dict[str, tuple[int, ...]]


def manifest(shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> Manifest:
    return Manifest(tuple(TensorSpec.of(name, dtype, shape) for name, shape in shapes.items()))


def sent(heads: Heads = FOUR, vocabulary: int = VOCABULARY) -> Shapes:
    """A model of one layer, with biases and norms over heads, as it is sent."""
    query, others = (count * HEAD_SIZE for count in heads)
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "lm_head.weight": (vocabulary, HIDDEN),
    }
    for name, rows in ((Q, query), (K, others), (V, others)):
        shapes |= {f"{name}.weight": (rows, HIDDEN), f"{name}.bias": (rows,)}
    norms = ("input_layernorm", "post_attention_layernorm")
    return shapes | {
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, query),
        f"{LAYER}.self_attn.q_norm.weight": (HEAD_SIZE,),
        f"{LAYER}.self_attn.k_norm.weight": (HEAD_SIZE,),
        f"{GATE}.weight": (MLP, HIDDEN),
        f"{UP}.weight": (MLP, HIDDEN),
        f"{LAYER}.mlp.down_proj.weight": (HIDDEN, MLP),
        **{f"{LAYER}.{norm}.weight": (HIDDEN,) for norm in norms},
        "model.norm.weight": (HIDDEN,),
    }


def held(shapes: Shapes) -> list[str]:
    """The names that a server has for such a model."""
    fused = {Q: QKV, K: QKV, V: QKV, GATE: GATE_UP, UP: GATE_UP}
    parts = (name.rpartition(".") for name in shapes)
    return list(dict.fromkeys(f"{fused.get(module, module)}.{kind}" for module, _, kind in parts))


def recipe(shapes: Shapes, name: str, server: Server = ONE_RANK, others: Iterable[str] = ()) -> Recipe | None:
    """The recipe of one tensor of a server; `others` are more names that it reports."""
    return derive(manifest(shapes), [name, *others], server).recipes.get(name)


def whole(*names: str) -> Recipe:
    return Recipe(tuple(Piece(name) for name in names))


def rows(name: str, start: int, stop: int) -> Piece:
    return Piece(name, Cut(0, start, stop))


def test_one_rank_holds_everything() -> None:
    """Nothing is unknown; q, k and v are one tensor, gate and up another, and all else keeps its name."""
    shapes = sent()
    derivation = derive(manifest(shapes), held(shapes))
    assert derivation.unknown == ()
    fused = {
        f"{QKV}.weight": whole(f"{Q}.weight", f"{K}.weight", f"{V}.weight"),
        f"{QKV}.bias": whole(f"{Q}.bias", f"{K}.bias", f"{V}.bias"),
        f"{GATE_UP}.weight": whole(f"{GATE}.weight", f"{UP}.weight"),
    }
    assert derivation.recipes == {name: fused.get(name, whole(name)) for name in held(shapes)}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_hold_everything_together(size: int) -> None:
    """Nothing is unknown, and what is divided has neither gaps nor overlaps, in the order of the ranks."""
    shapes = sent(Heads(8, 4))
    divided = {
        f"{QKV}.weight",
        f"{QKV}.bias",
        f"{GATE_UP}.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
    }
    divided |= {f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.down_proj.weight"}
    cuts: dict[str, list[Cut]] = {}
    for rank in range(size):
        derivation = derive(manifest(shapes), held(shapes), Server(rank, size, Heads(8, 4)))
        assert derivation.unknown == ()
        for name, made in derivation.recipes.items():
            assert made.zero_rows == 0
            for piece in made.pieces:
                dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
                cut = piece.cut or Cut(dim, 0, shapes[piece.name][dim] if name in divided else 0)
                assert cut.dim == dim
                if name in divided:
                    cuts.setdefault(piece.name, []).append(cut)
                else:
                    assert piece.cut is None
    for source, found in cuts.items():
        ends = [0, *(cut.stop for cut in found)]
        assert [cut.start for cut in found] == ends[:-1]
        assert ends[-1] == shapes[source][found[0].dim]


def test_key_heads_fewer_than_the_ranks_are_held_by_several() -> None:
    """Of two key heads, the first four ranks of eight hold one and the last four the other."""
    shapes = sent(Heads(8, 2))
    for rank in range(8):
        start = 16 * (rank // 4)
        assert recipe(shapes, f"{QKV}.weight", Server(rank, 8, Heads(8, 2))) == Recipe(
            (
                rows(f"{Q}.weight", 16 * rank, 16 * rank + 16),
                rows(f"{K}.weight", start, start + 16),
                rows(f"{V}.weight", start, start + 16),
            )
        )


@pytest.mark.parametrize(
    ("heads", "size"),
    [(Heads(6, 2), 4), (Heads(12, 3), 4), (Heads(12, 3), 2), (Heads(5, 2), 2), (Heads(4, 3), 1)],
)
def test_heads_that_cannot_be_divided_are_unknown(heads: Heads, size: int) -> None:
    """Where SGLang would not serve, nothing is said about q, k and v of a rank; one rank divides nothing."""
    made = recipe(sent(heads), f"{QKV}.weight", Server(0, size, heads))
    assert (made is None) == (size > 1)


@pytest.mark.parametrize("name", [Q, K, V])
def test_rows_that_are_not_of_these_heads_are_unknown(name: str) -> None:
    """The heads that were given are another model's."""
    shapes = sent() | {f"{name}.weight": (33, HIDDEN)}
    assert recipe(shapes, f"{QKV}.weight", Server(0, 2, FOUR)) is None


def test_what_cannot_be_divided_evenly_is_unknown() -> None:
    """Rows of an MLP, and columns, are divided into shares of one size or not at all."""
    shapes = sent()
    for name in (f"{GATE_UP}.weight", f"{LAYER}.mlp.down_proj.weight"):
        assert recipe(shapes, name, Server(0, 3)) is not None
        assert recipe(shapes, name, Server(0, 5)) is None


def test_without_the_heads_only_equal_parts_are_divided() -> None:
    """Rows alone do not say how many key heads there are, unless there are as many as query heads."""
    assert recipe(sent(), f"{QKV}.weight", Server(1, 2)) is None
    assert recipe(sent(Heads(4, 4)), f"{QKV}.weight", Server(1, 2)) == Recipe(
        tuple(rows(f"{name}.weight", 32, 64) for name in (Q, K, V))
    )


@pytest.mark.parametrize(
    ("count", "size", "shares"),
    [
        (512, 1, [(512, 0)]),
        (500, 1, [(500, 12)]),
        (65, 1, [(65, 63)]),
        (512, 2, [(256, 0), (256, 0)]),
        (500, 2, [(256, 0), (244, 12)]),
        (100, 3, [(64, 0), (36, 28), (0, 64)]),  # 128 rows are no multiple of three, 192 are
        (64, 2, [(32, 0), (32, 0)]),
        (151936, 4, [(37984, 0)] * 4),
        (50257, 3, [(16768, 0), (16768, 0), (16721, 47)]),
    ],
)
def test_a_vocabulary_is_padded_to_even_shares(count: int, size: int, shares: list[tuple[int, int]]) -> None:
    """Rows are padded with zeros to a multiple of 64, of 64 times the ranks where that cannot be divided."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        start = 0
        for rank, (length, zeros) in enumerate(shares):
            made = recipe(sent(vocabulary=count), name, Server(rank, size))
            cut = None if length == count and not zeros else Cut(0, start, start + length)
            assert made == Recipe((Piece(name, cut),), zeros)
            start += length


def test_a_tied_head_is_the_embedding() -> None:
    """A server that has a head of its own, and was sent none, has made it from the embedding."""
    shapes = sent()
    del shapes["lm_head.weight"]
    assert recipe(shapes, "lm_head.weight") == whole("model.embed_tokens.weight")
    assert recipe(shapes, "lm_head.bias") is None


def test_a_norm_over_all_heads_may_be_divided() -> None:
    """A rank's norm is known if it is over one head, and the heads are known; one rank has it whole."""
    name = f"{LAYER}.self_attn.q_norm.weight"
    shapes = sent() | {name: (4 * HEAD_SIZE,)}
    assert recipe(shapes, name) == whole(name)
    assert recipe(shapes, name, Server(0, 2, FOUR)) is None
    assert recipe(sent(), name, Server(0, 2, FOUR)) == whole(name)
    assert recipe(sent(), name, Server(0, 2)) is None


def test_a_bias_of_what_is_divided_by_columns_is_whole() -> None:
    """Every rank adds its part of a sum, and the bias is one of the whole sum."""
    name = f"{LAYER}.self_attn.o_proj.bias"
    assert recipe(sent() | {name: (HIDDEN,)}, name, Server(1, 2, FOUR)) == whole(name)


def experts(
    count: int, module: str = "mlp", parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    shapes = {name: shape for name, shape in sent().items() if ".mlp." not in name}
    for at in range(count):
        gate, up, down = (f"{LAYER}.{module}.experts.{at}.{part}.weight" for part in parts)
        shapes |= {gate: (MLP, HIDDEN), up: (MLP, HIDDEN), down: (HIDDEN, MLP)}
    return shapes


@pytest.mark.parametrize(
    ("module", "parts"),
    [("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))],
)
def test_experts_are_stacked(module: str, parts: tuple[str, str, str]) -> None:
    """A server that keeps them as loaded has gate above up for each expert, in the order of their numbers."""
    shapes = experts(12, module, parts)
    gate, up, down = ([f"{LAYER}.{module}.experts.{at}.{part}.weight" for at in range(12)] for part in parts)
    first, second = (f"{LAYER}.{module}.experts.{kind}" for kind in ("w13_weight", "w2_weight"))
    server = Server(experts_as_loaded=True)
    assert recipe(shapes, first, server) == whole(
        *(name for pair in zip(gate, up, strict=True) for name in pair)
    )
    assert recipe(shapes, second, server) == whole(*down)
    server = Server(1, 2, FOUR, experts_as_loaded=True)
    made = recipe(shapes, first, server)
    assert made is not None
    assert made.pieces[:2] == (rows(gate[0], 96, 192), rows(up[0], 96, 192))
    assert recipe(shapes, second, server) == Recipe(tuple(Piece(name, Cut(1, 96, 192)) for name in down))
    assert recipe(shapes, first) is None
    assert recipe(shapes, second) is None


def test_experts_of_which_some_are_elsewhere_are_unknown() -> None:
    """There is no stack with a gap in the numbers, or with shared experts that the server put among them."""
    name, server = f"{LAYER}.mlp.experts.w13_weight", Server(experts_as_loaded=True)
    shapes = experts(4)
    gap = {key: shape for key, shape in shapes.items() if ".experts.2." not in key}
    assert recipe(gap, name, server) is None
    shared = f"{LAYER}.mlp.shared_experts"
    shapes |= {f"{shared}.{part}.weight": (MLP, HIDDEN) for part in ("gate_proj", "up_proj")}
    assert recipe(shapes, name, server) is None
    assert recipe(shapes, name, server, [f"{shared}.gate_up_proj.weight"]) is not None


def test_a_router_with_a_correction_is_unknown() -> None:
    """Some servers keep it in float32, whatever was sent."""
    name = f"{LAYER}.mlp.gate.weight"
    shapes = experts(4) | {name: (4, HIDDEN)}
    assert recipe(shapes, name, Server(1, 2)) == whole(name)
    assert recipe(shapes | {f"{LAYER}.mlp.gate.e_score_correction_bias": (4,)}, name) is None


def test_latent_attention_is_known_to_one_rank() -> None:
    """The two projections into the latent space are one tensor, held by all; the others may be divided."""
    down, up = ("q_a_proj", "kv_a_proj_with_mqa"), f"{LAYER}.self_attn.kv_b_proj.weight"
    first, second = (f"{LAYER}.self_attn.{part}.weight" for part in down)
    shapes: Shapes = {first: (32, HIDDEN), second: (48, HIDDEN), up: (128, 32)}
    fused = f"{LAYER}.self_attn.fused_qkv_a_proj_with_mqa.weight"
    assert recipe(shapes, fused, Server(1, 2)) == whole(first, second)
    assert recipe(shapes, up) == whole(up)
    assert recipe(shapes, up, Server(1, 2)) is None


def test_what_is_sent_fused_is_known_to_one_rank() -> None:
    """It is taken as it is; how it is divided, its name does not say."""
    shapes: Shapes = {f"{QKV}.weight": (128, HIDDEN), f"{GATE_UP}.weight": (2 * MLP, HIDDEN)}
    for name in shapes:
        assert recipe(shapes, name) == whole(name)
        assert recipe(shapes, name, Server(0, 2, FOUR)) is None


@pytest.mark.parametrize("other", [f"{LAYER}.self_attn.W_pack.weight", f"{LAYER}.attn.c_attn.weight"])
def test_a_model_of_another_make_is_unknown(other: str) -> None:
    """A layer's tensor of an unknown name may mean that others are changed as they are loaded."""
    shapes = sent() | {other: (HIDDEN, HIDDEN)}
    derivation = derive(manifest(shapes), held(shapes))
    assert derivation == ({}, tuple(held(shapes)))


def test_other_names_are_unknown() -> None:
    """So is what the server has and was not sent, and what it was sent outside of the layers."""
    shapes = sent() | {"visual.blocks.0.attn.qkv.weight": (HIDDEN, HIDDEN)}
    names = [
        "visual.blocks.0.attn.qkv.weight",
        "model.layers.1.self_attn.qkv_proj.weight",
        "draft.lm_head.weight",
    ]
    names += [f"{LAYER}.self_attn.attn.k_scale", f"{LAYER}.mlp.experts.w13_weight", "x", "model.norm.step"]
    shapes["model.norm.step"] = (1,)
    derivation = derive(manifest(shapes), [*names, "model.norm.weight"])
    assert derivation == ({"model.norm.weight": whole("model.norm.weight")}, tuple(names))


@pytest.mark.parametrize("scale", [f"{Q}.weight_scale_inv", f"{QKV}.weight_scale"])
def test_a_quantised_weight_is_unknown(scale: str) -> None:
    """Whether it was sent with scales or the server has made them: what is hashed then was never sent."""
    shapes = sent()
    names = held(shapes)
    derivation = derive(manifest(shapes | {scale: (1, 1)}), names)
    assert derivation.unknown == (f"{QKV}.weight", f"{QKV}.bias")
    assert derive(manifest(shapes), [*names, scale]).unknown == (f"{QKV}.weight", f"{QKV}.bias", scale)
    assert (
        derive(
            manifest({GATE + ".weight": (1, 1), UP + ".weight": (1, 1)}, "F8_E4M3"), [GATE_UP + ".weight"]
        )[0]
        == {}
    )


def test_parts_of_two_number_formats_are_unknown() -> None:
    """A server has one format for the whole, so one of them was converted."""
    specs = [
        TensorSpec.of(f"{GATE}.weight", "F32", (MLP, HIDDEN)),
        TensorSpec.of(f"{UP}.weight", "BF16", (MLP, HIDDEN)),
    ]
    assert derive(Manifest(tuple(specs)), [f"{GATE_UP}.weight"]).unknown == (f"{GATE_UP}.weight",)


def test_parts_that_do_not_fit_are_unknown() -> None:
    """Rows of two lengths are not one matrix, and a single number has no rows."""
    assert recipe(sent() | {f"{UP}.weight": (MLP, 32)}, f"{GATE_UP}.weight") is None
    assert recipe(sent() | {"lm_head.weight": ()}, "lm_head.weight") is None


def test_a_part_that_was_not_sent_makes_the_whole_unknown() -> None:
    """A bias of q and v without one of k says nothing about the third part."""
    shapes = sent()
    del shapes[f"{K}.bias"]
    assert recipe(shapes, f"{QKV}.bias") is None
    assert recipe(shapes, f"{QKV}.weight") is not None


def test_a_plain_embedding_is_unknown_where_padding_would_tell() -> None:
    """Some models with norms before their MLPs neither pad nor divide their embedding."""
    norm = {f"{LAYER}.pre_feedforward_layernorm.weight": (HIDDEN,)}
    name = "model.embed_tokens.weight"
    assert recipe(sent() | norm, name) == whole(name)
    assert recipe(sent() | norm, name, Server(0, 2)) is None
    assert recipe(sent(vocabulary=500) | norm, name) is None


def test_a_cpu_pads_more() -> None:
    """Heads that cannot be divided, and MLPs that are no multiple of 32 rows a rank, are padded there."""
    shapes = sent()
    weights = [
        f"{QKV}.weight",
        f"{LAYER}.self_attn.o_proj.weight",
        f"{GATE_UP}.weight",
        f"{LAYER}.mlp.down_proj.weight",
    ]

    def unknown(size: int, heads: Heads | None) -> list[str]:
        return list(derive(manifest(shapes), weights, Server(0, size, heads, on_cpu=True)).unknown)

    assert unknown(1, None) == []
    assert unknown(2, FOUR) == []
    assert unknown(2, None) == weights[:2]
    assert unknown(4, FOUR) == weights
    assert derive(manifest(shapes), weights, Server(0, 4, FOUR)).unknown == ()
    assert recipe(sent(Heads(4, 4)), weights[0], Server(0, 2, None, on_cpu=True)) is None


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_there_is_not_is_refused(rank: int) -> None:
    """The message says which ranks there are."""
    with pytest.raises(WeightsError, match=rf"there is no rank {rank} of 2: count from 0"):
        derive(manifest(sent()), [], Server(rank, 2))
