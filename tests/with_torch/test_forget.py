"""The last refit of a registered source: the server's loader, in this process, lets go of its memory."""

import base64
import pickle

import pytest
import torch
from torch import nn

from refitfsm.server import LOADER
from refitfsm.server.loader import Desk
from refitfsm.weights.offer import RankPlace, Target
from refitfsm.weights.plan import Form, PushWish
from refitfsm.weights.torch_source import TorchSource

WISH = PushWish(loader=True)
SERVER = Target("server", (RankPlace(0, None),), "first start")


class Model(nn.Module):
    """Copies each weight into a parameter of its name, as SGLang's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("w", nn.Parameter(torch.zeros(8)))

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in named:
                getattr(self, name).copy_(tensor)


def refit(source: TorchSource, desk: Desk, model: Model, target: Target = SERVER) -> list[str]:
    """All pushes of a refit to a server that is this process; what each came to."""
    notes = []
    for chunk in source.plan(WISH).chunks:
        offer = source.offer(chunk, target)
        assert offer.load_format == LOADER
        desk.take(model, pickle.loads(base64.b64decode(offer.entries[0])))
        settled = offer.settle()
        assert settled.applied
        notes.append(settled.note)
    return notes


def test_a_registration_ends_with_the_refit_that_is_to_be_the_last() -> None:
    """The weights are loaded first, whether anew or at a word; afterwards nothing is lent."""
    weight, model, desk = torch.arange(8.0), Model(), Desk()
    source = TorchSource({"w": weight}, share_host_memory=True)
    assert refit(source, desk, model) == ["registered"]
    weight += 1
    source.forget_after_refit()
    assert refit(source, desk, model) == ["replayed", "forgotten"]
    assert torch.equal(model.w, weight)
    assert source.open_leases == ()
    weight += 1
    assert refit(source, desk, model) == ["registered", "forgotten"]
    assert torch.equal(model.w, weight)
    assert source.open_leases == ()


@pytest.mark.parametrize("known", [False, True])
def test_a_word_about_what_is_not_held_harms_nobody(known: bool) -> None:
    """A server without the registration ignores the word and keeps what else it holds; nothing is lent."""
    mine, other, model, desk = torch.arange(8.0), torch.ones(8), Model(), Desk()
    source = TorchSource({"w": mine}, share_host_memory=True)
    theirs = TorchSource({"w": other}, share_host_memory=True)
    if known:
        refit(source, desk, model)
    source.forget_after_refit()
    word = next(chunk for chunk in source.plan(WISH).chunks if chunk.form is Form.FORGET)
    assert refit(theirs, desk, model) == ["registered"]
    offer = source.offer(word, SERVER)
    desk.take(model, pickle.loads(base64.b64decode(offer.entries[0])))
    settled = offer.settle()
    assert settled.applied
    assert settled.note == ("the server had forgotten it before" if known else "nothing was registered")
    assert source.open_leases == ()
    other += 1
    assert refit(theirs, desk, model) == ["replayed"]
    assert torch.equal(model.w, other)


def test_a_word_to_each_rank() -> None:
    """As many words as the server has ranks."""
    source = TorchSource({"w": torch.zeros(8)}, share_host_memory=True)
    source.forget_after_refit()
    word = source.plan(WISH).chunks[-1]
    target = Target("server", (RankPlace(0, None), RankPlace(1, None)))
    assert len(source.offer(word, target).entries) == 2
