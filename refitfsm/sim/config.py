"""How one simulated server is started: the options of its command line, its model and its speed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from refitfsm.sim.content import TINY_VOCAB, Parameters, tiny_model

Span = tuple[float, float]
"""Lowest and highest duration, in seconds; the calm one is the lowest."""

NO_TIME: Final[Span] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Timings:
    """How long things take, in seconds. The defaults were measured on servers on one H200.

    Each duration is drawn between its two ends by the server's Chooser; equal ends draw nothing.
    """

    release_s: Span = (0.007, 0.109)
    resume_s: Span = (0.004, 0.082)
    flush_s: Span = (0.004, 0.007)
    pause_s: Span = (0.002, 0.005)
    session_s: Span = (0.003, 0.010)
    push_s: Span = (0.008, 0.013)
    """One update call, before its bytes."""
    push_s_per_gb: Span = (0.0025, 0.006)
    load_s_per_gb: Span = (0.3, 1.0)
    """Reading a checkpoint from disk."""
    control_s: Span = (0.001, 0.003)
    """Any other call that the scheduler answers."""
    prefill_s: Span = (0.004, 0.008)
    decode_s: Span = (0.004, 0.004)
    """One token."""
    death_s: Span = (5.0, 5.1)
    """From a fault in the scheduler to the cut of all connections."""
    exit_noticed_s: Span = (0.6, 1.6)
    """From an exit of the scheduler process to the watchdog's notice; then `death_s` begins."""
    boot_s: Span = (65.0, 76.0)
    """From `restart` to an open port."""
    warmup_s: Span = (0.5, 2.0)
    pause_poll_s: float = 1.0
    """A pause that aborts looks again after this long whether all requests have ended."""
    health_poll_s: float = 1.0
    health_timeout_s: float = 20.0
    hangup_poll_s: float = 4.0
    """How long the server may take to notice that the client of a plain request has gone."""
    stream_hangup_s: float = 2.0
    """When a streamed request whose client has gone is aborted."""


FAST: Final = Timings(
    release_s=NO_TIME,
    resume_s=NO_TIME,
    flush_s=NO_TIME,
    pause_s=NO_TIME,
    session_s=NO_TIME,
    push_s=NO_TIME,
    push_s_per_gb=NO_TIME,
    load_s_per_gb=NO_TIME,
    control_s=NO_TIME,
    prefill_s=NO_TIME,
    decode_s=(0.001, 0.001),
    boot_s=NO_TIME,
    warmup_s=NO_TIME,
)
"""Calls take no time; what SGLang itself waits for (death, polls, health) keeps its length."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One server's launch arguments, as far as the simulation knows them."""

    sglang_version: str = "0.5.23"
    tp_size: int = 1
    memory_saver: bool = True
    """False: release and resume keep books only, as without --enable-memory-saver."""
    weights_cpu_backup: bool = False
    cuda_graph_in_saver: bool = False
    """SGLANG_MEMORY_SAVER_CUDA_GRAPH=1: the graph pool is really released."""
    device: Literal["cuda", "cpu"] = "cuda"
    """On a CPU some actions of the weights checker do not exist."""
    reads_back: bool = True
    """Whether the model's code can read a tensor back: that of Llama can, that of most others cannot."""
    parameters: Parameters = field(default_factory=tiny_model)
    """The weights it starts with."""
    checkpoints: Mapping[str, Parameters] = field(default_factory=dict)
    """What /update_weights_from_disk finds, by path. `model_path` is always found."""
    model_path: str = "sim/tiny-llama"
    served_model_name: str = ""
    """Empty: the model path."""
    weight_version: str = "default"
    weights_bytes: int | None = None
    """Per rank; None: what the parameters add up to, divided by `tp_size`."""
    kv_cache_bytes: int = 64 << 20
    cuda_graph_bytes: int = 8 << 20
    fixed_bytes: int = 0
    """Context and buffers that are never released, per rank."""
    gpus: tuple[str, ...] = ()
    """The GPU of each rank; empty: one of its own for each."""
    api_key: str = ""
    admin_api_key: str = ""
    skip_warmup: bool = False
    skip_tokenizer_init: bool = False
    """Requests carry `input_ids` only, and answers no text."""
    vocab_size: int = TINY_VOCAB
    context_length: int = 1024
    max_running_requests: int = 256
    max_total_num_tokens: int = 4096
    launch_options: Mapping[str, object] = field(default_factory=dict)
    """Further fields of /server_info: options that change nothing else here."""
    timings: Timings = field(default_factory=Timings)

    def rank_weights_bytes(self) -> int:
        """Bytes of weights on one rank's GPU."""
        if self.weights_bytes is not None:
            return self.weights_bytes
        return sum(spec.nbytes for spec in self.parameters.values()) // self.tp_size
