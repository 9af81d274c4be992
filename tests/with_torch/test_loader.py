"""The server's loader, in this process: what it records of a model's loading, and when it copies again.

Memory is shared as between processes: what is pushed is pickled by name, and mapped a second time.
"""

import base64
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from refitfsm.server import protocol
from refitfsm.server.loader import LARGE_BYTES, Desk, load
from refitfsm.server.protocol import CONTROL, CONTROL_WORDS, ORDER, Reason, Status, started_at
from refitfsm.weights.shared import shared_entry
from tests.with_torch.test_loader_on_a_server import NOTHING, REGISTERED, REPLAYED, Named, Said, Sender

HIDDEN = 64
MODES = {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """How SGLang's scheduler may run: torch shows other operations in each."""
    with MODES[request.param]():
        yield request.param


def mapped(pairs: Named) -> Named:
    """The tensors as a server would get them."""
    named: Named = pickle.loads(base64.b64decode(shared_entry(pairs)))
    return named


class Near(Sender):
    """A sender whose server is this process."""

    def __init__(self, weights: dict[str, torch.Tensor], desk: Desk | None = None) -> None:
        super().__init__(weights)
        self.desk = desk or Desk()

    def push(self, order: tuple[str, torch.Tensor], rest: Named, *models: nn.Module) -> Said:
        for model in models:
            self.desk.take(model, [order, *rest])
        return self.answer()

    def register(self, *models: nn.Module) -> Said:
        return self.push(self.order("register"), mapped(self.lent()), *models)

    def replay(self, *models: nn.Module, kind: str = "replay") -> Said:
        return self.push(self.order(kind), [], *models)


ROWS = {"q": ("qkv", 0), "k": ("qkv", 64), "v": ("qkv", 80), "gate": ("gate_up", 0), "up": ("gate_up", 2048)}
PUSHED = {"norm": (HIDDEN,), "bias": (1,), "q": (64, HIDDEN), "k": (16, HIDDEN), "v": (16, HIDDEN)}
PUSHED |= {"gate": (2048, HIDDEN), "up": (2048, HIDDEN), "o": (HIDDEN, HIDDEN), "embed": (70, HIDDEN)}


class Layer(nn.Module):
    """Loads as SGLang's layers do: fused rows, a rank's share of columns, padding, another dtype."""

    def __init__(self, oddity: str = "") -> None:
        super().__init__()
        self.oddity = oddity
        shapes = {"qkv": (96, HIDDEN), "gate_up": (4096, HIDDEN), "o": (HIDDEN, 32), "embed": (72, HIDDEN)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 7.0)))
        self.norm = nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.zeros(HIDDEN))

    @torch.no_grad()
    def load_weights(self, weights: Named) -> None:
        for name, loaded in weights:
            if name == "gate" and self.oddity:
                ACTS[self.oddity][1](self, self.gate_up.data[:2048], loaded)
            if name != "gate" or self.oddity not in UNLOADED:
                self.load_one(name, loaded)

    def load_one(self, name: str, loaded: torch.Tensor) -> None:
        if name in ROWS:
            into, first = ROWS[name]
            getattr(self, into).data.narrow(0, first, loaded.shape[0]).copy_(loaded)
        elif name == "o":
            self.o.data.copy_(loaded.narrow(1, 32, 32))
        elif name == "embed":
            self.embed[: loaded.shape[0]].data.copy_(loaded)
            self.embed[loaded.shape[0] :].data.fill_(0)
        else:
            getattr(self, name).data.copy_(loaded[:])


POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()


def in_thread(pool: ThreadPoolExecutor, _: object, gate: torch.Tensor, of: torch.Tensor) -> None:
    pool.submit(torch.inference_mode()(gate.copy_), of).result()


ODDITIES: dict[Reason, dict[str, Callable[[Any, torch.Tensor, torch.Tensor], object]]] = {
    Reason.SOURCES_CONVERTED: {
        "converts": lambda _, gate, of: gate.copy_(of.to(torch.float16)),
        "quantises": lambda _, gate, of: gate.copy_((of / of.abs().max()).round()),
        "goes round": lambda _, gate, of: gate.copy_(torch.empty(2048, HIDDEN).copy_(of)),
        "reads a value": lambda model, _, of: model.norm.data.fill_(of[0, 0].item()),
        "writes back": lambda _, __, of: of.zero_(),
    },
    Reason.WRITTEN_OTHERWISE: {
        "adds": lambda model, _, __: model.bias.add_(1),
        "fills": lambda model, _, __: model.bias.copy_(torch.ones(HIDDEN)),
        "replaces": lambda model, _, __: setattr(model, "norm", nn.Parameter(torch.ones(HIDDEN))),
    },
    Reason.PARAMETERS_READ: {"derives": lambda model, _, __: model.qkv.detach().t().contiguous()},
    Reason.SOURCE_NOT_COPIED: {"ignores": lambda *_: 0, "old thread": lambda *all_: in_thread(POOL, *all_)},
    Reason.LOADED_IN_ANOTHER_THREAD: {"new thread": lambda *given: in_thread(ThreadPoolExecutor(1), *given)},
}
ACTS = {name: (reason, act) for reason, acts in ODDITIES.items() for name, act in acts.items()}
UNLOADED = ("converts", "quantises", "goes round", "ignores", "new thread", "old thread")


def near(seed: int = 50, desk: Desk | None = None) -> Near:
    sender = Near({name: torch.empty(shape) for name, shape in PUSHED.items()}, desk)
    sender.change(seed)
    return sender


def registered() -> tuple[Layer, Near]:
    model, sender = Layer(), near()
    assert sender.register(model) == REGISTERED
    return model, sender


def bits(model: nn.Module) -> dict[str, bytes]:
    state = model.state_dict()
    return {name: bytes(state[name].contiguous().view(torch.uint8).numpy().tobytes()) for name in state}


def freshly_loaded(model: nn.Module, sender: Near) -> dict[str, bytes]:
    model.load_weights([(name, tensor.clone()) for name, tensor in sender.weights.items()])
    return bits(model)


@contextmanager
def unchanged(model: nn.Module, sender: Near) -> Iterator[None]:
    """Nothing is copied into the model inside, although the sender's tensors have new values."""
    before = bits(model)
    sender.change(99)
    yield
    assert bits(model) == before


def test_a_replay_gives_what_a_fresh_load_gives(mode: str) -> None:
    """After any change of the sender's tensors a replay equals loading them, bit for bit, time after time."""
    model, sender = registered()
    assert bits(model) == freshly_loaded(Layer(), sender)
    for seed in range(1, 4):
        sender.change(seed)
        model.embed.data.fill_(torch.nan)  # released memory has lost its padding, too
        with torch.inference_mode(mode=bool(seed % 2)):
            assert sender.replay(model) == REPLAYED
        assert bits(model) == freshly_loaded(Layer(), sender)


def test_the_control_block_counts_bytes_and_joined_copies() -> None:
    """Bytes are those written; copies of memory that is adjacent on both sides are counted as one."""
    model, sender, flat = Layer(), near(), torch.ones(80 * HIDDEN)
    sender.weights["q"] = flat[: 64 * HIDDEN].view(64, HIDDEN)
    halves = flat[64 * HIDDEN :].view(torch.half).view(32, HIDDEN).split(16)
    sender.weights |= dict(zip("kv", halves, strict=True))
    assert model.gate_up.nbytes // 2 >= LARGE_BYTES > model.qkv.nbytes
    assert sender.register(model) == REGISTERED
    words = sender.control.tolist()
    assert words[protocol.BYTES_AT] == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert words[protocol.COPIES_AT] == 9  # k and v in one; q, gate, up, o, norm, bias, embed and its padding
    flat.fill_(3.1)
    assert sender.replay(model) == REPLAYED
    assert bits(model) == freshly_loaded(Layer(), sender)


@pytest.mark.parametrize("oddity", ACTS)
def test_what_cannot_be_repeated_is_loaded_and_let_go(oddity: str, mode: str) -> None:
    """A model that does more than copy gets its weights, the sender the reason, and a replay does nothing."""
    model, sender = Layer(oddity), near()
    assert sender.register(model) == (Status.LOADED, ACTS[oddity][0])
    assert bits(model) == freshly_loaded(Layer(oddity), sender)
    assert sender.users() == 1
    with unchanged(model, sender):
        assert sender.replay(model) == NOTHING


@pytest.mark.parametrize("change", ["moved", "retyped", "reshaped", "joined"])
def test_a_model_that_changed_is_not_written_to(change: str) -> None:
    """Once a parameter is elsewhere or otherwise nothing is copied, the reason is told, all is let go."""
    model, sender = registered()
    match change:
        case "moved":
            model.norm.data = model.norm.data.clone()
        case "retyped":
            model.norm.data = model.norm.data.view(torch.float16)
        case "reshaped":
            model.norm.data = model.norm.data.view(2, -1)
        case "joined":
            model.extra = nn.Parameter(torch.ones(2))
    with unchanged(model, sender):
        assert sender.replay(model) == (Status.VOID, Reason.PARAMETERS_MOVED)
        assert sender.replay(model) == NOTHING
    assert sender.users() == 1


def test_two_models_of_one_process_share_a_push() -> None:
    """A draft model that takes the same orders is recorded, too, and no other; the worse answer stands."""
    target, draft, sender = Layer(), Layer(), near()
    assert sender.register(target, draft) == REGISTERED
    sender.change(1)
    assert sender.replay(target, draft) == REPLAYED
    assert bits(target) == bits(draft) == freshly_loaded(Layer(), sender)
    draft.norm.data = draft.norm.data.clone()
    assert sender.replay(target, draft) == (Status.VOID, Reason.PARAMETERS_MOVED)
    for pair in ([Layer("ignores"), Layer()], [Layer(), Layer("ignores")]):
        assert sender.register(*pair) == (Status.LOADED, Reason.SOURCE_NOT_COPIED)
        assert sender.replay(*pair) == NOTHING
    assert sender.register(target) == REGISTERED
    with unchanged(draft, sender):
        assert sender.replay(draft) == (Status.VOID, Reason.OTHER_MODEL)


def test_what_is_revoked_is_void() -> None:
    """Once the sender has revoked, or uses its block for something else, no late order copies anything."""
    model, sender = registered()
    sender.control[protocol.REVOKED_AT] = 1
    with unchanged(model, sender):
        assert sender.replay(model) == (Status.VOID, Reason.REVOKED)
        assert sender.register(model) == (Status.VOID, Reason.REVOKED)
    model, sender = registered()
    sender.control.fill_(5)
    with unchanged(model, sender):
        sender.replay(model)
    assert sender.control.tolist() == [5] * CONTROL_WORDS


def test_a_dead_sender_s_memory_is_left_alone() -> None:
    """A process that was seen and is gone is not copied from; one that never was seen is not asked for."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        model, sender = Layer(), near()
        sender.pid, sender.started = process.pid, started_at(process.pid) or 0
        assert sender.register(model) == REGISTERED
        assert sender.replay(model) == REPLAYED
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started_at(process.pid) is None  # it is dead before its parent asks
    words = sender.control.tolist()
    with unchanged(model, sender):
        assert sender.replay(model) == NOTHING
    assert sender.control.tolist() == words
    sender.started += 1
    assert (sender.register(model), sender.replay(model)) == (REGISTERED, REPLAYED)


@pytest.mark.parametrize("field", ["name", "secret"])
def test_who_does_not_know_the_registration_gets_nothing(field: str) -> None:
    """A wrong name or secret copies nothing, tells nothing, and leaves the registration as it was."""
    model, sender = registered()
    right = getattr(sender, field)
    setattr(sender, field, "0" * 32)
    with unchanged(model, sender):
        assert (sender.replay(model), sender.replay(model, kind="forget")) == (NOTHING, NOTHING)
    setattr(sender, field, right)
    assert sender.replay(model) == REPLAYED


def test_one_registration_is_held_until_another_comes_or_it_is_forgotten() -> None:
    """What is not held any more is not known any more, and its memory is let go at once."""
    model, first = registered()
    second = near(60, first.desk)
    assert second.register(model) == REGISTERED
    assert (first.users(), second.users()) == (1, 2)
    assert (first.replay(model), second.replay(model)) == (NOTHING, REPLAYED)
    assert second.replay(model, kind="forget") == (Status.VOID, Reason.FORGOTTEN)
    assert second.users() == 1


def test_an_order_is_carried_out_once_or_not_at_all() -> None:
    """An order that arrives twice copies once: memory may have changed. One that fails is not answered."""
    model, sender = registered()
    order = sender.order("replay")
    assert sender.push(order, [], model) == REPLAYED
    with unchanged(model, sender):
        sender.push(order, [], model)
    assert sender.replay(model) == REPLAYED
    del vars(model)["_buffers"]
    assert (sender.replay(model), sender.users()) == (NOTHING, 1)


def test_what_is_the_model_s_stays_the_model_s() -> None:
    """An ordinary push is loaded, by the function that SGLang calls; a load that fails raises and is void."""
    model, sender = registered()
    load(model, list(sender.weights.items()))
    load(model, [])
    assert bits(model) == freshly_loaded(Layer(), sender)
    sender.weights["q"] = torch.ones(3, 3)
    with pytest.raises(RuntimeError):
        sender.register(model)
    assert sender.replay(model) == NOTHING


DTYPES, SHAPES = (torch.uint8, torch.int64, torch.bool, torch.half), ((), (0,), (3,), (8,), (2, 2))
BROKEN = [torch.zeros(shape, dtype=dtype) for dtype in DTYPES for shape in SHAPES]
BROKEN += [torch.zeros(3, device="meta", dtype=torch.uint8), torch.eye(3).to_sparse()]
BROKEN += [torch.zeros(1 << 20, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64)[::2]]


def test_nothing_malformed_raises_or_writes() -> None:
    """Whatever stands in an order's place, the loader returns; the model and the sender's block stay."""
    draw, (model, sender) = random.Random(7), registered()
    words, control = sender.control.tolist(), mapped([("", sender.control)])[0][1]
    with unchanged(model, sender):
        for _ in range(300):
            odd, tensor = draw.choice(BROKEN), sender.order(draw.choice(["register", "replay"]))[1]
            spoilt = tensor.clone()
            spoilt[draw.randrange(60)] ^= 1 << draw.randrange(7)  # before the number and the process
            head = draw.choice([spoilt, draw.choice(BROKEN), tensor[: draw.randrange(len(tensor))]])
            rest = [(CONTROL, control), (CONTROL, odd), (ORDER, odd), (ORDER, tensor)]
            sender.push((ORDER, head), draw.sample(rest, draw.randrange(len(rest))), model)
            sender.push(sender.order("register"), [(CONTROL, odd)], model)
    assert sender.control.tolist() == words


@pytest.mark.parametrize("spoilt", ["order", "control", "magic", "kind", "weights"])
def test_weights_that_cannot_be_registered_are_loaded(spoilt: str) -> None:
    """Weights are loaded, and no more is made of it, where the order is malformed or memory a copy."""
    model, sender = Layer(), near()
    order, rest = sender.order("replay" if spoilt == "kind" else "register"), mapped(sender.lent())
    if spoilt == "order":
        order[1][5] ^= 1
    if spoilt == "magic":
        sender.control[protocol.MAGIC_AT] = 1
    if spoilt in {"control", "weights"}:
        at = 0 if spoilt == "control" else -1
        rest[at] = (rest[at][0], rest[at][1].clone())
    told: Said = (Status.LOADED, Reason.NOT_MAPPED) if spoilt == "weights" else NOTHING
    assert sender.push(order, rest, model) == told
    assert bits(model) == freshly_loaded(Layer(), sender)
    del rest
    assert (sender.users(), sender.replay(model)) == (1, NOTHING)


class Drawn(nn.Module):
    """A model of random parameters that are loaded by random slices; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.pushed: dict[str, tuple[int, int]] = {}
        self.moves: list[tuple[str, int, int, int, int]] = []
        for at in range(draw.randrange(2, 7)):
            rows, columns = draw.randrange(1, 9), draw.randrange(1, 9)
            zeros = torch.zeros(rows, columns, dtype=draw.choice([torch.float, torch.half]))
            setattr(self, f"p{at}", nn.Parameter(zeros))
            for first, last in pairwise(sorted({0, rows, *(draw.randrange(rows) for _ in range(2))})):
                name, extra = f"s{len(self.pushed)}", draw.choice([0, 0, 3])
                self.pushed[name] = (last - first, columns + extra)
                earlier = max(0, first - draw.choice([0, 0, 1]))
                self.moves += [(name, at, earlier, last, extra)] * draw.choice([1, 1, 2])

    def load_weights(self, weights: Named) -> None:
        """What is written last stays: slices may overlap those before them."""
        loaded = dict(weights)
        for name, at, first, last, extra in self.moves:
            into, source = getattr(self, f"p{at}").data[first:last], loaded[name][:, extra:]
            into[-source.shape[0] :].copy_(source)
            into[: into.shape[0] - source.shape[0]].fill_(0.5)


@pytest.mark.parametrize("seed", range(40))
def test_random_models_replay_as_they_load(seed: int) -> None:
    """Overlapping, adjacent, strided and converting copies, in any order, give what loading gives."""
    model = Drawn(seed)
    flat, weights = torch.zeros(4096), dict[str, torch.Tensor]()
    for name, shape in model.pushed.items():
        used = sum(tensor.numel() for tensor in weights.values())
        part = flat[used : used + shape[0] * shape[1]].view(shape)
        weights[name] = part if seed % 2 else part.clone()
    sender = Near(weights)
    assert sender.register(model) == REGISTERED
    for change in range(2):
        sender.change(seed + change)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        assert sender.replay(model) == REPLAYED
        assert bits(model) == freshly_loaded(Drawn(seed), sender)
