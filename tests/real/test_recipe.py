"""What the rest of the project takes for granted about a real server holds on this one."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from refitfsm.weights.offer import RankPlace, Target
from refitfsm.weights.payload import cpu_payload
from refitfsm.weights.plan import PushWish
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource
from tests.real.server import (
    STANDINS,
    Answer,
    Greedy,
    NoAnswerError,
    RealServer,
    ServeReal,
    call,
    eventually,
)

ROOT = Path(__file__).resolve().parents[2]
PROMPT = (5, 6, 7)
TOKENS = 8
KILLED = -9
DEATH_S = 30.0  # a fault ends the server after some 5 s


def ok(url: str, path: str, body: object = None) -> Any:
    """The value of an answer that must be 200."""
    answer = call(url, path, body)
    assert answer.status == 200, (path, answer)
    return answer.value


def rest(url: str) -> None:
    """Flush until it is taken. An answer comes before the scheduler is done with its request, and a flush is
    refused and a release kills until it is."""
    eventually(lambda: call(url, "/flush_cache", {}).status == 200, "the scheduler is idle")


def push(url: str, checkpoint: Path, version: str, *, tp: int = 1) -> None:
    """Send a checkpoint in one session, one payload a rank, without flushes."""
    ranks = tuple(RankPlace(rank, None) for rank in range(tp))
    ok(url, "/begin_weight_update", {})
    with closing(CheckpointSource(CheckpointFolder.open(checkpoint))) as source:
        for chunk in source.plan(PushWish(chunk_bytes_max=200_000)).chunks:
            entries = [entry.decode("ascii") for entry in source.offer(chunk, Target("s", ranks)).entries]
            body = {"serialized_named_tensors": entries, "flush_cache": False, "weight_version": version}
            ok(url, "/update_weights_from_tensor", body)
    ok(url, "/end_weight_update", {})
    rest(url)


def checksum(url: str) -> str:
    """The server's own digest of all its weights."""
    value: str = ok(url, "/weights_checker", {"action": "checksum"})["per_engine_checksum"]
    return value


@pytest.fixture
def url(real_server: RealServer, checkpoint_a: Path) -> Iterator[str]:
    """The shared server, on checkpoint A and open before the test and after it."""
    yield real_server.url
    ok(real_server.url, "/continue_generation", {})
    ok(real_server.url, "/update_weights_from_disk", {"model_path": str(checkpoint_a)})


def test_a_push_gives_the_answers_of_the_pushed_checkpoint(
    url: str, checkpoint_a: Path, checkpoint_b: Path, greedy: Greedy
) -> None:
    """After a push the server answers as if it had loaded that checkpoint from disk, and says so."""
    before, sum_before = greedy(url, PROMPT, TOKENS), checksum(url)
    ok(url, "/update_weights_from_disk", {"model_path": str(checkpoint_b)})
    wanted, sum_wanted = greedy(url, PROMPT, TOKENS), checksum(url)
    assert wanted != before
    assert sum_wanted != sum_before

    push(url, checkpoint_a, "run:1")
    assert (greedy(url, PROMPT, TOKENS), checksum(url)) == (before, sum_before)
    push(url, checkpoint_b, "run:2")
    assert (greedy(url, PROMPT, TOKENS), checksum(url)) == (wanted, sum_wanted)
    assert ok(url, "/model_info")["weight_version"] == "run:2"


def test_an_update_needs_a_session(url: str) -> None:
    """An update outside a session and a second begin are refused, and change nothing."""
    before = checksum(url)
    refused = call(url, "/update_weights_from_tensor", {"serialized_named_tensors": ["AA=="]})
    assert refused.status == 400
    assert refused.value["success"] is False
    ok(url, "/begin_weight_update", {})
    assert call(url, "/begin_weight_update", {}).status == 400
    ok(url, "/end_weight_update", {})
    assert call(url, "/end_weight_update", {}).status == 400
    assert checksum(url) == before


def test_an_unknown_tensor_is_accepted_in_silence(url: str, checkpoint_a: Path) -> None:
    """Success does not prove that a tensor was taken: this is why a push is checked for coverage."""
    before = checksum(url)
    with closing(CheckpointFolder.open(checkpoint_a)) as folder:
        spec = folder.manifest.tensors[0]
        entry = cpu_payload([(spec._replace(name="model.nope.weight"), folder.tensor(spec.name))])
    ok(url, "/begin_weight_update", {})
    answer = ok(url, "/update_weights_from_tensor", {"serialized_named_tensors": [entry.decode("ascii")]})
    ok(url, "/end_weight_update", {})
    assert answer["success"] is True
    assert checksum(url) == before


def test_two_starts_can_be_told_apart(real_server: RealServer, real_server_saver: RealServer) -> None:
    """A start draws a seed of its own, reports the time it took, and forgets a version set before."""
    ok(real_server.url, "/update_weight_version", {"new_version": "stamp", "abort_all_requests": False})
    assert ok(real_server.url, "/model_info")["weight_version"] == "stamp"
    assert ok(real_server_saver.url, "/model_info")["weight_version"] == "default"
    first, second = (ok(running.url, "/server_info") for running in (real_server, real_server_saver))
    assert first["random_seed"] != second["random_seed"]
    assert first["startup_time"] != second["startup_time"]


def test_server_info_has_what_a_driver_reads(real_server_saver: RealServer) -> None:
    """The facts that decide the dialect and the policy stand at the top level of /server_info."""
    info = ok(real_server_saver.url, "/server_info")
    expected = {
        "version": "0.5.23",
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": False,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "device": "cpu",
        "dtype": "float32",
        "quantization": None,
        "speculative_algorithm": None,
        "page_size": 1,
        "skip_server_warmup": False,
        "custom_weight_loader": [],
        "base_gpu_id": 0,
    }
    assert {name: info.get(name) for name in expected} == expected


def test_a_health_probe_during_a_pause_leaves_the_server_unready(url: str, greedy: Greedy) -> None:
    """The probe fails and marks the server; it serves again at once, and only a new probe clears the mark."""
    ok(url, "/pause_generation", {})
    assert call(url, "/ready").status == 503
    assert call(url, "/health").status == 503
    ok(url, "/continue_generation", {})
    assert len(greedy(url, PROMPT, 2)) == 2
    assert call(url, "/ready").status == 503
    assert call(url, "/health").status == 200
    assert call(url, "/ready").status == 200


class Held:
    """A generation sent from a thread of its own."""

    def __init__(self, url: str) -> None:
        self.answer: Answer | None = None
        self._thread = threading.Thread(target=self._send, args=(url,))
        self._thread.start()

    def _send(self, url: str) -> None:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        self.answer = call(url, "/generate", {"input_ids": list(PROMPT), "sampling_params": sampling})

    def result(self) -> Any:
        self._thread.join(60)
        assert self.answer is not None
        assert self.answer.status == 200, self.answer
        return self.answer.value


def test_a_paused_server_holds_requests_over_a_release(
    real_server_saver: RealServer, checkpoint_a: Path, checkpoint_b: Path, greedy: Greedy
) -> None:
    """A request sent while everything is released waits, and is answered from the new weights alone."""
    url = real_server_saver.url
    before = greedy(url, PROMPT, TOKENS)
    push(url, checkpoint_b, "b")
    wanted = greedy(url, PROMPT, TOKENS)
    push(url, checkpoint_a, "a")
    assert greedy(url, PROMPT, TOKENS) == before

    ok(url, "/pause_generation", {})
    rest(url)
    ok(url, "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    held = Held(url)
    assert ok(url, "/model_info")["weight_version"] == "a"
    ok(url, "/resume_memory_occupation", {"tags": ["weights"]})
    push(url, checkpoint_b, "b")
    ok(url, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    rest(url)
    assert held.answer is None
    ok(url, "/continue_generation", {})
    answer = held.result()
    assert answer["output_ids"] == wanted
    assert answer["meta_info"]["weight_version"] == "b"
    push(url, checkpoint_a, "a")


def test_weights_released_without_a_backup_are_lost(
    real_server_saver: RealServer, checkpoint_a: Path, greedy: Greedy
) -> None:
    """Resuming is not enough: until a push the server answers 200 with garbage."""
    url = real_server_saver.url
    before = greedy(url, PROMPT, TOKENS)
    rest(url)
    ok(url, "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    ok(url, "/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
    assert greedy(url, PROMPT, TOKENS) != before
    push(url, checkpoint_a, "a")
    assert greedy(url, PROMPT, TOKENS) == before


def test_a_backup_keeps_the_weights_and_a_second_release_kills(serve: ServeReal, greedy: Greedy) -> None:
    """With a CPU copy the weights come back by themselves; releasing twice ends the server unanswered."""
    running = serve(memory_saver=True, flags=["--enable-weights-cpu-backup"])
    before = greedy(running.url, PROMPT, TOKENS)
    rest(running.url)
    ok(running.url, "/release_memory_occupation", {"tags": ["weights"]})
    ok(running.url, "/resume_memory_occupation", {"tags": ["weights"]})
    assert greedy(running.url, PROMPT, TOKENS) == before

    rest(running.url)
    ok(running.url, "/release_memory_occupation", {"tags": ["kv_cache"]})
    with pytest.raises(NoAnswerError):
        call(running.url, "/release_memory_occupation", {"tags": ["kv_cache"]})
    assert running.wait_exit(DEATH_S) == KILLED
    assert "Cannot pause allocation that is not active." in running.log


def test_each_rank_takes_its_own_payload(
    serve: ServeReal, checkpoint_a: Path, checkpoint_b: Path, real_server: RealServer, greedy: Greedy
) -> None:
    """Two tensor-parallel ranks, each sent the whole tensors, answer as one rank does."""
    running = serve(tp=2)
    wanted_a = greedy(real_server.url, PROMPT, TOKENS)
    assert greedy(running.url, PROMPT, TOKENS) == wanted_a
    push(running.url, checkpoint_b, "b", tp=2)
    assert greedy(running.url, PROMPT, TOKENS) != wanted_a
    push(running.url, checkpoint_a, "a", tp=2)
    assert greedy(running.url, PROMPT, TOKENS) == wanted_a


def test_a_stopped_server_leaves_nothing(serve: ServeReal) -> None:
    """SIGTERM ends a server with status 0, and its port is free again."""
    running = serve()
    assert running.stop() == 0
    with pytest.raises(NoAnswerError):
        call(running.url, "/model_info")


def test_sglang_reads_our_payloads(real_python: Path) -> None:
    """SGLang's own unpickler and torch decode every payload to the tensors that were put in."""
    path = os.pathsep.join([str(STANDINS), str(ROOT)])
    done = subprocess.run(
        [str(real_python), str(ROOT / "tests" / "real" / "check_payload.py")],
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout
