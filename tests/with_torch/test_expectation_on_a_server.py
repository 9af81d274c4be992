"""The checksums that this process expects are those that a real server reports, on the CPU.

One server has a dense model and one rank; the other a model of experts with biases and an odd vocabulary, and
two ranks.
"""

import asyncio
import json
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from refitfsm import Fleet
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.expectation import Expectation, compare, expect
from refitfsm.weights.files import tiny_checkpoint, write_safetensors
from refitfsm.weights.fusion import Heads
from refitfsm.weights.hashing import hash_cpu, overall, overall_of_ranks
from tests.real.server import RealServer, call, side_by_side

HEADS = Heads(4, 2)
HIDDEN, VOCABULARY, EXPERTS, EXPERT_ROWS, HEAD_SIZE = 64, 500, 12, 64, 16
LAYER = "model.layers.0"

Tensors = dict[str, torch.Tensor]


class Servers(NamedTuple):
    """Two servers, and the folders that they have loaded."""

    dense: RealServer
    dense_folder: Path
    experts: RealServer
    experts_folder: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    dense = tiny_checkpoint(tmp_path_factory.mktemp("dense"), seed=0)
    experts = experts_checkpoint(tmp_path_factory.mktemp("experts"))
    python = Path(sys.executable)
    # Experts compute with kernels that have no stand-in; loading and hashing need none.
    one, two = RealServer(python, dense), RealServer(python, experts, tp=2, flags=["--skip-server-warmup"])
    with side_by_side(one, two):
        yield Servers(one, dense, two, experts)


def experts_checkpoint(folder: Path) -> Path:
    """A Qwen3 of one layer with twelve experts."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": True,
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "eos_token_id": 2,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
        "mlp_only_layers": [],
        "moe_intermediate_size": EXPERT_ROWS,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS.query,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": HEADS.key_value,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = random.Random(1)
    tensors = {}
    for name, shape in experts_shapes().items():
        count = torch.Size(shape).numel()
        data = struct.pack(f"<{count}f", *(draw.uniform(-0.1, 0.1) for _ in range(count)))
        tensors[name] = ("F32", shape, data)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def experts_shapes() -> dict[str, tuple[int, ...]]:
    query, others = (count * HEAD_SIZE for count in HEADS)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{LAYER}.input_layernorm.weight": (HIDDEN,),
        f"{LAYER}.post_attention_layernorm.weight": (HIDDEN,),
        f"{LAYER}.self_attn.q_norm.weight": (HEAD_SIZE,),
        f"{LAYER}.self_attn.k_norm.weight": (HEAD_SIZE,),
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, query),
        f"{LAYER}.self_attn.o_proj.bias": (HIDDEN,),
        f"{LAYER}.mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for part, rows in (("q", query), ("k", others), ("v", others)):
        shapes[f"{LAYER}.self_attn.{part}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{LAYER}.self_attn.{part}_proj.bias"] = (rows,)
    for at in range(EXPERTS):
        for part in ("gate_proj", "up_proj"):
            shapes[f"{LAYER}.mlp.experts.{at}.{part}.weight"] = (EXPERT_ROWS, HIDDEN)
        shapes[f"{LAYER}.mlp.experts.{at}.down_proj.weight"] = (HIDDEN, EXPERT_ROWS)
    return shapes


def report(server: RealServer) -> Any:
    answer = call(server.url, "/weights_checker", {"action": "checksum"})
    assert answer.status == 200, answer
    return answer.value


def tensors(folder: Path) -> Tensors:
    loaded: Tensors = load_file(folder / "model.safetensors")
    return loaded


def changed(given: Tensors, name: str) -> Tensors:
    """The same, but for the last bit of the last element of one."""
    other = given[name].clone()
    other.view(torch.int32).view(-1)[-1] ^= 1
    return given | {name: other}


def expected(given: Tensors, sums: dict[str, str], rank: int = 0) -> Expectation:
    """What a rank of the server with the experts has to report."""
    return expect(given, sums, tp_rank=rank, tp_size=2, heads=HEADS, experts_as_loaded=True)


def test_one_rank_reports_what_is_expected(servers: Servers) -> None:
    """Every tensor that the server names is derived, and equal, and so are the checksums of them all."""
    told = report(servers.dense)
    (rank,) = told["ranks"]
    expectation = expect(tensors(servers.dense_folder), rank["checksums"])
    assert expectation == Expectation(rank["checksums"], ())
    assert compare(expectation, rank["checksums"]) == ()
    assert overall(expectation.checksums) == rank["per_gpu_checksum"]
    assert overall_of_ranks([rank["per_gpu_checksum"]]) == told["per_engine_checksum"]


def test_each_of_two_ranks_reports_what_is_expected(servers: Servers) -> None:
    """So do ranks that hold shares of heads, of experts, and of a vocabulary with padding."""
    told = report(servers.experts)
    given = tensors(servers.experts_folder)
    for at, rank in enumerate(told["ranks"]):
        expectation = expected(given, rank["checksums"], at)
        assert expectation == Expectation(rank["checksums"], ())
        assert overall(expectation.checksums) == rank["per_gpu_checksum"]
    first, second = (rank["per_gpu_checksum"] for rank in told["ranks"])
    assert first != second
    assert overall_of_ranks([first, second]) == told["per_engine_checksum"]


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        (f"{LAYER}.self_attn.v_proj.weight", f"{LAYER}.self_attn.qkv_proj.weight"),
        (f"{LAYER}.self_attn.k_proj.bias", f"{LAYER}.self_attn.qkv_proj.bias"),
        (f"{LAYER}.mlp.experts.7.up_proj.weight", f"{LAYER}.mlp.experts.w13_weight"),
        (f"{LAYER}.mlp.experts.11.down_proj.weight", f"{LAYER}.mlp.experts.w2_weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_changed_tensor_is_named(servers: Servers, sent: str, held: str) -> None:
    """One bit of the last element is enough, and only the rank that holds it differs."""
    ranks = report(servers.experts)["ranks"]
    given = changed(tensors(servers.experts_folder), sent)
    for at, named in enumerate([(), (held,)]):
        sums = ranks[at]["checksums"]
        assert compare(expected(given, sums, at), sums) == named


def test_a_push_is_seen(servers: Servers, tmp_path: Path) -> None:
    """After a push the server has what was pushed, and no longer what it had: all but the norms differ."""
    before, after = tensors(servers.dense_folder), tensors(tiny_checkpoint(tmp_path, seed=1))

    async def life() -> None:
        async with Fleet.connect([servers.dense.url], policy="always_on") as fleet:
            await fleet.refit(after, 1)

    asyncio.run(life())
    sums = report(servers.dense)["ranks"][0]["checksums"]
    assert compare(expect(after, sums), sums) == ()
    assert compare(expect(before, sums), sums) == tuple(sorted(name for name in sums if "norm" not in name))


def test_what_is_not_certain_is_unknown_and_not_accused(servers: Servers) -> None:
    """Without a word on heads and experts the rest is still compared, and names on one side alone differ."""
    sums = report(servers.experts)["ranks"][1]["checksums"]
    expectation = expect(tensors(servers.experts_folder), sums, tp_rank=1, tp_size=2)
    layer = {f"{LAYER}.mlp.experts.w13_weight", f"{LAYER}.mlp.experts.w2_weight"}
    layer |= {f"{LAYER}.self_attn.{part}" for part in ("qkv_proj.weight", "qkv_proj.bias", "o_proj.weight")}
    layer |= {f"{LAYER}.self_attn.{part}_norm.weight" for part in "qk"}
    assert set(expectation.unknown) == layer
    assert compare(expectation, sums) == ()
    others = {name: value for name, value in sums.items() if name != "model.norm.weight"} | {"new": "0" * 16}
    assert compare(expectation, others) == ("model.norm.weight", "new")


def test_tensors_that_cannot_be_hashed_are_refused() -> None:
    """The message names the tensor; nothing is expected of a server that names nothing."""
    with pytest.raises(WeightsError, match="tensor 'x' is not contiguous: give"):
        expect({"x": torch.zeros(2, 3).T}, [])
    assert expect({"model.norm.weight": torch.ones(3)}, []) == Expectation({}, (), ("model.norm.weight",))
    assert expect({}, ["x"]) == Expectation({}, ("x",))
    name = "model.norm.weight"
    assert expect({name: torch.ones(3)}, [name]).checksums == {name: hash_cpu(torch.ones(3))}
