"""A rank's own part of a group's push: tensors on its GPU as handles, on the CPU as bytes."""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from refitfsm.weights.cuda import CudaMemory
from refitfsm.weights.handles import LentOffer, Replica, list_offer
from refitfsm.weights.lending import Ledger
from refitfsm.weights.manifest import TensorSpec
from refitfsm.weights.offer import BytesOffer, Offer, RankPlace, Settled, Target
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.torch_checks import spec_of

if TYPE_CHECKING:
    import torch

_HERE = Target("a server", (RankPlace(0, None),))


class OneEntry:
    """An offer to one rank, and the tensors it lends out, which live as long as it does."""

    def __init__(self, offer: Offer, named: "Sequence[tuple[str, torch.Tensor]]") -> None:
        self.entry = offer.entries[0]
        self.load_format = offer.load_format
        self._offer = offer
        self._named = named

    def settle(self) -> Settled:
        """See `Offer.settle`."""
        settled = self._offer.settle()
        self._named = ()
        return settled

    def withdraw(self) -> None:
        """See `Offer.withdraw`."""
        self._offer.withdraw()
        self._named = ()


def encode_here(named: "Sequence[tuple[str, torch.Tensor]]") -> OneEntry:
    """The entry of a chunk of whole tensors, all on one device.

    Raises:
        WeightsError: a tensor cannot be sent as it lies, or its memory cannot be shared.
    """
    specs = [(spec_of(name, tensor), tensor) for name, tensor in named]
    device = named[0][1].device
    if device.type == "cpu":
        return OneEntry(BytesOffer((cpu_payload((spec, raw_view(t, spec)) for spec, t in specs),)), named)
    replica = Replica(CudaMemory(int(device.index)), dict(named))
    offer: LentOffer = list_offer(_HERE, [replica], [name for name, _ in named], Ledger())
    return OneEntry(offer, named)


def raw_view(tensor: "torch.Tensor", spec: TensorSpec) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they lie. Needs no numpy, copies nothing."""
    return memoryview((ctypes.c_char * spec.nbytes).from_address(tensor.data_ptr())).cast("B")
