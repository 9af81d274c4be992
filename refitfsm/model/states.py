"""What a server can be: the five states, and the named values its view is made of.

The five states are deliberately few. Everything else that matters beside them (which memory is
resident, what the weights are, whether the gate is open) is a fact of its own in the view, because
one label cannot say two things.
"""

from enum import StrEnum


class ServerState(StrEnum):
    """Where a server stands in the refit cycle."""

    OFFLINE = "offline"
    """Not known to run, or not enrolled: nothing may be sent but an enrolment."""
    RELEASED = "released"
    """Paused, and some of its GPU memory is given back."""
    WEIGHTS_STAGED = "weights_staged"
    """Paused, weights resident, their content being replaced or already replaced."""
    KV_REBUILT = "kv_rebuilt"
    """Paused, everything resident, content complete and verified, cache confirmed empty."""
    SERVING = "serving"
    """Answers requests while its gate is open."""


class Tag(StrEnum):
    """A part of GPU memory that SGLang can release and resume on its own."""

    WEIGHTS = "weights"
    """The model's parameters; lost on release unless backed up."""
    KV_CACHE = "kv_cache"
    """The KV pools; always lost on release."""
    CUDA_GRAPH = "cuda_graph"
    """The graphs' memory; really released only with SGLANG_MEMORY_SAVER_CUDA_GRAPH=1."""


ALL_TAGS: frozenset[Tag] = frozenset(Tag)


class Gate(StrEnum):
    """Admission of new requests by this controller."""

    OPEN = "open"
    """Requests are admitted."""
    DRAINING = "draining"
    """None is admitted; those in flight are waited for."""
    CLOSED = "closed"
    """None is admitted, and none is waited for."""


class Condition(StrEnum):
    """How far a server can be trusted, beside the state it is in."""

    HEALTHY = "healthy"
    """All that is believed was confirmed."""
    SUSPECT = "suspect"
    """A command ended without an answer, and what it did is not known."""
    QUARANTINED = "quarantined"
    """Bytes of new weights moved and the cycle did not commit: the weights may be mixed."""
    RETIRED = "retired"
    """Taken out of use for good."""


class ContentKind(StrEnum):
    """What the weights in memory are."""

    UNDEFINED = "undefined"
    """Bytes of no version."""
    PARTIAL = "partial"
    """Some chunks of a version are in."""
    COMPLETE = "complete"
    """All chunks of one version are in."""
