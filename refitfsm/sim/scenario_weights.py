"""Weights in scenarios: a trainer's, with what it lends counted, and those that a client sends by hand."""

import msgspec

from refitfsm.errors import ConfigError
from refitfsm.sim.content import digest_of, tiny_model, tiny_tensors
from refitfsm.sim.scenario_steps import Push, Weights
from refitfsm.sim.tiny import TinyWeights
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.offer import BytesOffer, Offer, Settled, Target
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.plan import ChunkPlan, PushWish


class _Counted:
    """An offer that says when it is done with."""

    def __init__(self, offer: Offer, server: str, lent: list[str]) -> None:
        self._offer = offer
        self._server = server
        self._lent = lent
        self._out = True
        lent.append(server)

    @property
    def load_format(self) -> str | None:
        return self._offer.load_format

    @property
    def entries(self) -> tuple[bytes, ...]:
        return self._offer.entries

    def settle(self) -> Settled:
        """See `Offer.settle`."""
        self.withdraw()
        return Settled(applied=True)

    def withdraw(self) -> None:
        """See `Offer.withdraw`."""
        if self._out:
            self._out = False
            self._lent.remove(self._server)


class TrainerWeights(TinyWeights):
    """The tiny model of one seed, with what a step changes about it. Keeps count of what is lent to whom."""

    def __init__(self, step: Weights, version: int) -> None:
        super().__init__(version if step.seed is None else step.seed)
        self._step = step
        self.lent: list[str] = []
        """The servers that have not given back what was lent, one entry for each offer."""

    @property
    def manifest(self) -> Manifest:
        """See `WeightSource.manifest`."""
        step, whole = self._step, super().manifest
        if not step.without and not step.renamed:
            return whole
        kept = (spec for spec in whole.tensors if spec.name not in step.without)
        return Manifest(tuple(spec._replace(name=step.renamed.get(spec.name, spec.name)) for spec in kept))

    def offer(self, chunk: ChunkPlan, target: Target) -> Offer:
        """See `WeightSource.offer`."""
        if not self._step.renamed:
            return _Counted(super().offer(chunk, target), target.server, self.lent)
        entry = _encoded(self.seed, self._step.renamed, set(chunk.names))
        return _Counted(BytesOffer((entry,) * len(target.ranks)), target.server, self.lent)


class HandWeights(TinyWeights):
    """The tiny model of one seed, for a client that makes the body of an update itself."""

    @property
    def digest(self) -> str:
        """Of the whole model."""
        return digest_of(tiny_model(self.seed))

    def body(self, step: Push, ranks: int) -> bytes:
        """The body of /update_weights_from_tensor.

        Raises:
            ConfigError: there are not so many chunks.
        """
        chunks = self.plan(PushWish()).chunks
        wanted = step.chunks or range(len(chunks))
        if not set(wanted) <= set(range(len(chunks))):
            raise ConfigError(
                f"chunks {list(step.chunks)} of a push: there are {len(chunks)}, counted from 0"
            )
        names = {name for at in wanted for name in chunks[at].names}
        entry = _encoded(self.seed, step.renamed, {step.renamed.get(name, name) for name in names})
        fields: dict[str, object] = {
            "serialized_named_tensors": [entry.decode()] * (step.payloads or ranks),
            "flush_cache": step.flush_cache,
        }
        if step.label:
            fields["weight_version"] = str(step.version)
        return msgspec.json.encode(fields)


def _encoded(seed: int, renamed: dict[str, str], names: set[str]) -> bytes:
    """A payload of those tensors that have one of these names once they are renamed."""
    return cpu_payload(
        (TensorSpec.of(renamed.get(name, name), dtype, shape), data)
        for name, (dtype, shape, data) in tiny_tensors(seed).items()
        if renamed.get(name, name) in names
    )
