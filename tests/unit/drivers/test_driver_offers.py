"""What is lent for a push comes back, however the push ends."""

import asyncio
import threading

import pytest

from refitfsm.drivers.push import Load, Making, Threads, inline
from refitfsm.drivers.sglang import SGLangDriver
from refitfsm.drivers.transport import AnswerLost, NotSent, Reply, Unreachable
from refitfsm.model.records import Issued
from refitfsm.model.values import Capabilities, Command, CommandKind, EventName
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.manifest import Manifest, TensorSpec
from refitfsm.weights.offer import Offer, Settled, Target
from refitfsm.weights.plan import ChunkPlan, PushPlan, PushWish, plan_list

MANIFEST = Manifest((TensorSpec.of("w", "U8", (4,)),))
OK = Reply(200, b'{"success":true,"message":"Success"}')
NEW_LABEL = Reply(200, b'{"weight_version":"refitfsm:run:1"}')
LABEL = Reply(200, b'{"weight_version":"mine"}')


class Lent:
    """An offer that counts what becomes of it."""

    load_format: str | None = None
    entries = (b"QQ==",)

    def __init__(self, *outcomes: Settled | Exception) -> None:
        self.all = outcomes
        self.outcomes = list(outcomes)
        self.ends: list[str] = []

    def settle(self) -> Settled:
        self.ends.append("settled")
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def withdraw(self) -> None:
        self.ends.append("withdrawn")


class Source:
    """Gives the same offer each time."""

    manifest = MANIFEST

    def __init__(self, offer: Lent) -> None:
        self.lent = offer
        self.offers = 0

    def plan(self, wish: PushWish) -> PushPlan:
        return plan_list(MANIFEST, wish.chunk_bytes_max)

    def offer(self, chunk: ChunkPlan, target: Target) -> Offer:
        self.offers += 1
        return self.lent

    def release(self) -> None: ...

    def close(self) -> None: ...


Answer = Reply | Exception


class Wire:
    """Answers the label, then each push as told."""

    def __init__(
        self,
        *pushes: Answer,
        label: Answer = LABEL,
        label_after: Answer = NEW_LABEL,
    ) -> None:
        self.pushes = list(pushes)
        self.label, self.label_after = label, label_after
        self.sent = 0

    async def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        answer = self.label
        if path == "/update_weights_from_tensor":
            self.sent += 1
            answer = self.pushes.pop(0)
            self.label = self.label_after
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def aclose(self) -> None: ...


def push(wire: Wire, lent: Lent) -> tuple[EventName, str, Source]:
    """What the driver observes of one push."""
    source = Source(lent)
    driver = SGLangDriver(wire, "run", aside=inline)
    driver._capabilities, driver._labels = Capabilities("0.5.16"), ("mine",)
    driver.load = Load(source, source.plan(PushWish()).chunks)

    async def life() -> tuple[EventName, str, Source]:
        command = Command(CommandKind.PUSH, version=1, chunk=0, chunks=1)
        found = await driver.execute(Issued("s", 1, 1, command, asyncio.get_running_loop().time() + 60))
        return found.event, found.detail, source

    return asyncio.run(life())


APPLIED = Settled(applied=True)
VOID = Settled(applied=False, note="not replayed: revoked")


@pytest.mark.parametrize(
    ("wire", "lent", "event", "ends"),
    [
        (Wire(OK), Lent(APPLIED), EventName.PUSHED, ["settled"]),
        (Wire(Reply(400, b'{"success":false}')), Lent(), EventName.FAILED, []),
        (Wire(NotSent("refused")), Lent(), EventName.DIED, ["withdrawn"]),
        (Wire(Unreachable("no file")), Lent(), EventName.REFUSED, ["withdrawn"]),
        (Wire(AnswerLost("cut")), Lent(), EventName.LOST, []),
        (Wire(label=NotSent("refused")), Lent(), EventName.DIED, ["withdrawn"]),
        (Wire(label=Reply(200, b'{"weight_version":"theirs"}')), Lent(), EventName.DIED, ["withdrawn"]),
        (Wire(OK), Lent(WeightsError("still held")), EventName.FAILED, ["settled"]),
        (Wire(OK), Lent(RuntimeError("CUDA error")), EventName.FAILED, ["settled"]),
        (Wire(OK, OK), Lent(VOID, APPLIED), EventName.PUSHED, ["settled", "settled"]),
        (Wire(OK, OK), Lent(VOID, VOID), EventName.FAILED, ["settled", "settled"]),
        (Wire(OK, Unreachable("no file")), Lent(VOID), EventName.FAILED, ["settled", "withdrawn"]),
        (Wire(OK, AnswerLost("cut")), Lent(VOID), EventName.LOST, ["settled"]),
        (Wire(OK, label_after=AnswerLost("cut")), Lent(VOID), EventName.FAILED, ["settled", "withdrawn"]),
    ],
)
def test_what_becomes_of_an_offer(wire: Wire, lent: Lent, event: EventName, ends: list[str]) -> None:
    """It is settled when the server took it, withdrawn when it did not, and left where that is unknown."""
    found, detail, source = push(wire, lent)
    assert (found, lent.ends) == (event, ends), detail
    assert source.offers == (2 if "settled" in ends and VOID in lent.all else 1)


def test_a_void_push_is_made_again_and_the_audit_says_why() -> None:
    """A push that proves not to have been applied is followed by another, whose detail says why."""
    wire = Wire(OK, OK)
    _, detail, _ = push(wire, Lent(VOID, Settled(applied=True, note="registered")))
    assert wire.sent == 2
    assert detail == "registered (not replayed: revoked)"


@pytest.mark.parametrize("late", [False, True])
def test_an_offer_whose_caller_has_gone_is_withdrawn(late: bool) -> None:
    """A caller that is cancelled while an offer is made leaves nothing lent, whichever comes first."""
    lent = Lent()
    go = threading.Event()

    def make() -> tuple[Offer, bytes]:
        assert go.wait(20)
        return lent, b""

    making = Making(make)

    async def life() -> None:
        threads = Threads(1)
        task = asyncio.ensure_future(threads(making))
        await asyncio.sleep(0)
        if not late:
            go.set()
            await task
        making.abandon()
        go.set()
        await asyncio.wait_for(task, 20)
        threads.close()

    asyncio.run(life())
    assert lent.ends == ["withdrawn"]
