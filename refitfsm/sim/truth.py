"""The true state of one simulated server: what it really holds, not what anyone believes.

`Truth` is one record with synchronous methods and no clock. The scheduler and the HTTP face decide
when a method is called; laws and tests read the record between calls. A method that would raise
inside the real scheduler raises `Fatal`, and the server is dead.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from refitfsm.model.states import Tag
from refitfsm.sim import tokens
from refitfsm.sim.config import SimConfig
from refitfsm.sim.content import TensorSpec
from refitfsm.sim.kv import KvSpan, PrefixCache
from refitfsm.sim.ledger import GpuLedger
from refitfsm.sim.profiles import SimProfile, profile_for
from refitfsm.sim.requests import Answer, Phase, Request, TokenSpan, extend
from refitfsm.sim.residency import RELEASE_ORDER, RESUME_ORDER, Fatal, Residency
from refitfsm.sim.weights import LoadError, WeightStore

__all__ = ["UNDEFINED", "Answer", "Fatal", "Session", "Truth"]

UNDEFINED: Final = "undefined"
"""Stands where a weights digest would, for tokens and KV entries made by undefined weights."""


class Session(NamedTuple):
    """An open weight-update session."""

    selector: str
    loaded: bool


class Truth:
    """What one server is. Attributes are read by anyone and written by the simulator only."""

    def __init__(self, name: str, config: SimConfig, ledger: GpuLedger) -> None:
        self.name = name
        self.config = config
        self.profile: SimProfile = profile_for(config.sglang_version)
        self.memory = Residency(name, config, ledger)
        self.incarnation = 0
        self.alive = False
        self.death: str | None = None
        """Why the last incarnation died."""
        self.answers: list[Answer] = []
        """Every answer given, oldest first, over all incarnations. Only ever appended to."""
        self._reset()

    def _reset(self) -> None:
        self.weights = WeightStore(self.config.parameters, self.config.tp_size)
        self.kv = PrefixCache()
        self.running: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.leaving = 0
        """Requests that are answered, and that the scheduler's batch still holds, for a step at most."""
        self.gate_closed = False
        """The front end holds new requests back."""
        self.scheduler_pause: str | None = None
        """Why the scheduler itself makes no steps: "in_place" or "retract"; None while it makes them."""
        self.session: Session | None = None
        self.version_front = self.config.weight_version
        self.version_scheduler = self.config.weight_version

    # --- life and memory --------------------------------------------------------------------------

    def start(self) -> bool:
        """A new incarnation with its start-up weights; False, and nothing changes, without GPU room."""
        if not self.memory.take_all():
            return False
        self._reset()
        self.incarnation += 1
        self.alive = True
        self.death = None
        return True

    def die(self, cause: str) -> None:
        """The processes are gone, and the GPU memory with them."""
        self.alive = False
        self.death = cause
        self.memory.give_all()

    @property
    def resident(self) -> frozenset[Tag]:
        """Tags whose memory the server really holds; none when it is dead."""
        return self.memory.resident if self.alive else frozenset()

    def idle(self) -> bool:
        """Idle as the scheduler computes it, for release and for flush."""
        ignore_waiting = self.profile.waiting_ignored_while_paused and self.scheduler_pause is not None
        return not self.running and not self.leaving and (ignore_waiting or not self.waiting)

    def release(self, tags: Sequence[str] | None) -> None:
        """/release_memory_occupation, in the scheduler.

        Raises:
            Fatal: not idle, or a tag is released already and the memory saver is real.
        """
        if not self.idle():
            raise Fatal("AssertionError: release_memory_occupation should be called only when server is idle")
        wanted = tags or RELEASE_ORDER
        self.memory.listed.update(wanted)
        for tag in RELEASE_ORDER:
            if tag not in wanted:
                continue
            freed = self.memory.unmap(tag)
            if tag == Tag.KV_CACHE:
                self.kv.clear()
            if tag == Tag.WEIGHTS and freed and not self.config.weights_cpu_backup:
                self.weights.lose()

    def resume(self, tags: Sequence[str] | None) -> None:
        """/resume_memory_occupation, in the scheduler.

        Raises:
            Fatal: a tag is not on the list of released ones, or a GPU has no room.
        """
        wanted = tags or RELEASE_ORDER
        self.memory.unlist(wanted)
        for tag in RESUME_ORDER:
            if tag in wanted:
                self.memory.remap(tag)

    # --- weights ----------------------------------------------------------------------------------

    def weights_digest(self) -> str | None:
        """`content_digest` of the weights in memory; None while released or in part undefined.

        A torn or mixed set has a digest too: one that no published set of weights has.
        """
        return self.weights.digest() if self.alive and Tag.WEIGHTS in self.memory.resident else None

    def touch_weights(self, doing: str) -> None:
        """Anything that reads or writes weight memory calls this first.

        Raises:
            Fatal: the memory is not there.
        """
        if Tag.WEIGHTS in self.memory.released:
            raise Fatal(f"CUDA error: an illegal memory access was encountered ({doing})")

    def apply(self, rank: int, name: str, spec: TensorSpec, *, direct: bool = False) -> bool:
        """Load one tensor on one rank; False for a name the model does not have.

        Raises:
            Fatal: another shape, or (direct) an unknown name, or the weights are released.
        """
        self.touch_weights("load")
        try:
            if direct:
                self.weights.load_direct(rank, name, spec)
                return True
            return self.weights.load(rank, name, spec)
        except LoadError as error:
            raise Fatal(str(error)) from error

    def apply_tensor(self, name: str, dtype: str, shape: tuple[int, ...], digest: str) -> bool:
        """Load one tensor, given by digest, on every rank; False for a name the model does not have.

        Raises:
            Fatal: as `apply`.
        """
        spec = TensorSpec(dtype, shape, digest)
        loaded = [self.apply(rank, name, spec) for rank in range(self.config.tp_size)]
        return all(loaded)

    # --- cache ------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Empty the prefix cache if the scheduler is idle; whether it was."""
        if not self.idle():
            return False
        self.kv.clear()
        return True

    # --- generation -------------------------------------------------------------------------------

    def forward(self) -> str:
        """A forward pass begins: the digest of the weights it uses, or `UNDEFINED`.

        Raises:
            Fatal: it touches memory that is released.
        """
        gone = [tag for tag in Tag if tag in self.memory.released]
        if gone:
            raise Fatal(f"CUDA error: an illegal memory access was encountered (forward, {gone[0]} released)")
        return self.weights.digest() or UNDEFINED

    def compute(self, request: Request) -> None:
        """Get a running request ready for steps: prefill what has no KV, and note the weights.

        Raises:
            Fatal: the forward pass touches released memory, or the prompt is empty or has an id outside the
                vocabulary.
        """
        digest = self.forward()
        if not request.kv:
            if not request.prompt:
                raise Fatal("IndexError: the prompt is empty")
            if any(token >= self.config.vocab_size for token in request.prompt):
                raise Fatal("IndexError: index out of range in self")
            request.context = request.context or tokens.begin(request.prompt)
            sequence = request.sequence()
            reused, spans = self.kv.match(sequence)
            if not request.tokens:
                request.cached_tokens = reused
            request.kv = [*spans, KvSpan(digest, len(sequence) - reused)]
            self.kv.insert(sequence, request.kv)
        foreign = tuple(dict.fromkeys(span.weights for span in request.kv if span.weights != digest))
        request.kv_read.extend(label for label in foreign if label not in request.kv_read)
        request.computing = digest
        defined = digest != UNDEFINED and not self.weights.poisoned()
        request.seed = tokens.seed_of(digest, foreign) if defined else None

    def produce(self, request: Request, count: int) -> None:
        """Append `count` tokens made by the weights that `compute` noted."""
        if count <= 0:
            return
        start = len(request.tokens)
        for _ in range(count):
            token, request.context = tokens.step(request.context, request.seed, self.config.vocab_size)
            request.tokens.append(token)
        end = start + count
        extend(request.weights, request.computing, start, end)
        extend(request.versions, self.version_scheduler, start, end)
        last = request.kv[-1]
        if last.weights == request.computing:
            request.kv[-1] = KvSpan(last.weights, last.length + count)
        else:
            request.kv.append(KvSpan(request.computing, count))

    def retract_all(self) -> None:
        """Running requests go back to the waiting queue and lose their KV."""
        for request in self.running.values():
            request.kv = []
            request.lead_s = 0.0
            request.phase = Phase.WAITING
            request.retractions += 1
        self.waiting = {**self.running, **self.waiting}
        self.running = {}

    def drop(self, request: Request) -> None:
        """Forget a request that ends without an answer."""
        self.running.pop(request.rid, None)
        self.waiting.pop(request.rid, None)
        request.phase = Phase.DONE

    def finish(self, request: Request, *, aborted: bool) -> Answer:
        """End a request: its KV stays cached, and its answer is written down."""
        self.drop(request)
        if request.kv:
            self.kv.insert(request.sequence(), request.kv)
        answer = Answer(
            rid=request.rid,
            prompt=request.prompt,
            tokens=tuple(request.tokens),
            weights=tuple(request.weights),
            kv_read=tuple(request.kv_read),
            version=self._version_told(request.versions),
            aborted=aborted,
            incarnation=self.incarnation,
        )
        if not request.probe:
            self.answers.append(answer)
        return answer

    def _version_told(self, spans: list[TokenSpan]) -> str:
        """The version in an answer: of its last tokens, or (older releases) of the front end now."""
        if self.profile.version_spans and spans:
            return spans[-1].label
        return self.version_front
