"""What names alone tell of weights and a server's model: what is certain, and what is left open."""

import pytest

from refitfsm.weights.fusion import Departures, departures
from refitfsm.weights.manifest import Manifest, TensorSpec

LAYER = "model.layers.0"
ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
MLP = tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
NORMS = ("input_layernorm", "post_attention_layernorm")
LAYERS = tuple(f"{LAYER}.{path}.weight" for path in (*ATTENTION, *MLP, *NORMS))
SENT = ("model.embed_tokens.weight", "lm_head.weight", *LAYERS, "model.norm.weight")
JOINED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
JOINED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def held() -> list[str]:
    """The names that a server has for such a model."""
    parts = [name.split(".") for name in SENT]
    return list(dict.fromkeys(".".join(JOINED.get(part, part) for part in name) for name in parts))


def manifest(*names: str) -> Manifest:
    return Manifest(tuple(TensorSpec.of(name, "BF16", (8,)) for name in names))


def test_names_alone_tell_what_is_missing_and_what_is_unknown() -> None:
    """A server's weight of which nothing is sent, and a weight of a layer that goes into none of its own."""
    norm, extra = (f"{LAYER}.{path}_layernorm.weight" for path in ("input", "post_feedforward"))
    assert departures(manifest(*SENT), held()) == Departures()
    assert departures(manifest(*(name for name in SENT if name != norm)), held()) == Departures((norm,), ())
    assert departures(manifest(*SENT, extra), held()) == Departures((), (extra,))


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        f"{LAYER}.self_attn.rotary_emb.inv_freq",
        f"{LAYER}.self_attn.o_proj.bias",
        f"{LAYER}.mlp.shared_experts.up_proj.weight",
        f"{LAYER}.self_attn.lora_a.weight",
        "model.layers.61.self_attn.q_proj.weight",
        "model.mtp.weight",
    ],
)
def test_what_servers_leave_out_is_not_refused(name: str) -> None:
    """Tied heads, buffers, other kinds, joined experts, and layers that belong to another model."""
    names = [held_name for held_name in held() if held_name != "lm_head.weight"]
    assert departures(manifest(*{*SENT, name}), names) == Departures()


def test_names_tell_nothing_of_a_model_that_may_have_others() -> None:
    """Weights that are not known here, more than half of them missing, or none at all."""
    assert departures(manifest(*SENT), [*held(), "visual.patch_embed.proj.weight"]) is None
    assert departures(manifest(*(f"language_{name}" for name in SENT)), held()) is None
    assert departures(manifest(*SENT), []) is None
    assert departures(manifest(*SENT), [f"{LAYER}.mlp.experts.w13_weight"]) is None
