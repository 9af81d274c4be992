"""The loader inside a real server on the CPU, by plain calls: this process sends, from shared memory."""

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from refitfsm.server import LOADER, protocol
from refitfsm.server.protocol import CONTROL, CONTROL_WORDS, MAGIC, ORDER, Order, Reason, Status, started_at
from refitfsm.weights.files import tiny_checkpoint
from refitfsm.weights.shared import shared_entry
from tests.real.server import RealServer, call

ROOT = Path(__file__).resolve().parents[2]
Named = list[tuple[str, torch.Tensor]]
Said = tuple[Status | None, Reason]
REPLAYED: Said = (Status.REPLAYED, Reason.NONE)
REGISTERED: Said = (Status.REGISTERED, Reason.NONE)
NOTHING: Said = (None, Reason.NONE)


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Sender:
    """Weights, a control block, and the orders that go with them."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights, self.seq = weights, 0
        self.control = torch.zeros(CONTROL_WORDS, dtype=torch.int64)
        self.control[protocol.MAGIC_AT] = MAGIC
        self.name, self.secret = secrets.token_hex(16), secrets.token_hex(16)
        self.pid, self.started = os.getpid(), started_at(os.getpid()) or 0

    def order(self, kind: str) -> tuple[str, torch.Tensor]:
        """The next order, as what it is pushed as."""
        self.seq += 1
        order = Order(kind, self.name, self.secret, self.seq, self.pid, self.started).encode()
        return ORDER, torch.frombuffer(bytearray(order), dtype=torch.uint8)

    def lent(self) -> Named:
        """What follows the order of a registration."""
        return [(CONTROL, self.control), *self.weights.items()]

    def answer(self) -> Said:
        """What stands in the control block about the last order."""
        words = self.control.tolist()
        if words[protocol.SEQ_AT] != self.seq:
            return NOTHING
        return Status(words[protocol.STATUS_AT]), Reason(words[protocol.REASON_AT])

    def change(self, seed: int) -> None:
        """Write random values into the weights."""
        for number, tensor in enumerate(self.weights.values()):
            tensor.copy_(values(1000 * seed + number, *tensor.shape))

    def users(self) -> int:
        """How many mappings torch counts of the file that holds the first tensor."""
        _, handle, _ = next(iter(self.weights.values())).untyped_storage()._share_filename_cpu_()
        head = (Path("/dev/shm") / handle.decode().lstrip("/")).read_bytes()[:4]
        return int.from_bytes(head, sys.byteorder)


def test_an_order_is_read_as_it_was_written_and_no_other() -> None:
    """Every order survives encoding; any other spelling of its JSON, or a field out of range, is none."""
    good = Order("register", "a" * 32, "0" * 32, 1, 2, 3)
    text = good.encode().decode()
    assert Order.decode(text.encode()) == good
    bad = [text + " ", text.upper(), text.replace(":1", ":1.0"), text.replace(":1", ":true"), "[" * 400, ""]
    bad += [text.replace("register", "delete"), text.replace("a" * 32, "a" * 33), text.replace(":1", ":0")]
    bad += [text.replace(":1", f":{1 << 63}"), text.replace(":3", ':3,"more":4'), text.replace(":3", ":-3")]
    assert [spelling for spelling in bad if Order.decode(spelling.encode()) is not None] == []
    assert Order.decode(text.encode("utf-16")) is None
    assert len({protocol.reason_text(code) for code in range(-1, len(Reason) + 1)}) == len(Reason) + 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny_checkpoint(tmp_path_factory.mktemp(f"seed{seed}"), seed) for seed in range(4)]


@pytest.fixture(scope="module")
def server(checkpoints: list[Path]) -> Iterator[RealServer]:
    flags = ("--custom-weight-loader", LOADER)
    with RealServer(Path(sys.executable), checkpoints[0], flags=flags, pythonpath=(ROOT,)) as running:
        yield running


def push(server: RealServer, named: Named, load_format: str | None = LOADER) -> None:
    """One push in a session of its own, on a server that is paused meanwhile."""
    body = {
        "serialized_named_tensors": [shared_entry(named).decode()],
        "load_format": load_format,
        "flush_cache": False,
    }
    calls = {
        "/pause_generation": {},
        "/begin_weight_update": {},
        "/update_weights_from_tensor": body,
        "/end_weight_update": {},
        "/continue_generation": {},
    }
    for path, content in calls.items():
        answer = call(server.url, path, content)
        assert answer.status == 200, (path, answer)


def checksum(server: RealServer) -> str:
    answer = call(server.url, "/weights_checker", {"action": "checksum"})
    return str(answer.value["per_engine_checksum"])


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def expected(server: RealServer, checkpoints: list[Path]) -> list[str]:
    """The checksum of each checkpoint after an ordinary push."""
    found = []
    for checkpoint in checkpoints:
        push(server, list(tensors(checkpoint).items()), load_format=None)
        found.append(checksum(server))
    assert len(set(found)) == len(checkpoints)
    return found


def registered(server: RealServer, checkpoint: Path) -> Sender:
    sender = Sender(tensors(checkpoint))
    push(server, [sender.order("register"), *sender.lent()])
    assert sender.answer() == REGISTERED
    return sender


def replay(server: RealServer, sender: Sender, kind: str = "replay") -> Said:
    push(server, [sender.order(kind)])
    return sender.answer()


def fill(sender: Sender, checkpoint: Path) -> None:
    for name, tensor in tensors(checkpoint).items():
        sender.weights[name].copy_(tensor)


def test_the_server_follows_the_sender_s_memory(
    server: RealServer, checkpoints: list[Path], expected: list[str]
) -> None:
    """Registering loads; each replay brings what the tensors hold by then, as an ordinary push would."""
    sender = registered(server, checkpoints[1])
    assert checksum(server) == expected[1]
    for seed in (2, 3, 0):
        fill(sender, checkpoints[seed])
        assert replay(server, sender) == REPLAYED
        assert checksum(server) == expected[seed]
    nbytes = sum(tensor.nbytes for tensor in sender.weights.values())
    assert sender.control[protocol.BYTES_AT] == nbytes


def test_nothing_is_copied_after_a_revocation(
    server: RealServer, checkpoints: list[Path], expected: list[str]
) -> None:
    """A replay that comes after the sender has revoked says so, and leaves the weights as they were."""
    sender = registered(server, checkpoints[1])
    fill(sender, checkpoints[2])
    sender.control[protocol.REVOKED_AT] = 1
    assert replay(server, sender) == (Status.VOID, Reason.REVOKED)
    assert replay(server, sender) == NOTHING
    assert checksum(server) == expected[1]
    assert sender.users() == 1


def test_a_stranger_s_order_does_nothing(
    server: RealServer, checkpoints: list[Path], expected: list[str]
) -> None:
    """Orders that the server does not know or understand change nothing; it lives, and keeps what it has."""
    sender, stranger = registered(server, checkpoints[1]), Sender({})
    fill(sender, checkpoints[2])
    assert replay(server, stranger) == NOTHING
    assert replay(server, stranger, "forget") == NOTHING
    push(server, [(ORDER, torch.zeros(9, 9))])
    push(server, [stranger.order("register"), (CONTROL, torch.ones(3))])
    assert checksum(server) == expected[1]
    assert replay(server, sender) == REPLAYED
    assert checksum(server) == expected[2]


def test_what_is_forgotten_is_let_go(
    server: RealServer, checkpoints: list[Path], expected: list[str]
) -> None:
    """A server that forgets a registration unmaps its memory, and loads ordinary pushes as ever."""
    sender = registered(server, checkpoints[1])
    assert sender.users() == 2
    assert replay(server, sender, "forget") == (Status.VOID, Reason.FORGOTTEN)
    assert sender.users() == 1
    assert replay(server, sender) == NOTHING
    push(server, list(tensors(checkpoints[3]).items()))
    assert checksum(server) == expected[3]
