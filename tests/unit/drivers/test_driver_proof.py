"""What a server says of itself decides whether its values are read back at all."""

import asyncio

import pytest

from refitfsm.drivers.proof import unforeseen
from refitfsm.drivers.push import Load, inline
from refitfsm.drivers.sglang import SGLangDriver
from refitfsm.drivers.transport import NotSent, Reply
from refitfsm.model.records import Issued
from refitfsm.model.values import Capabilities, Command, CommandKind, EventName, VerifyLevel
from refitfsm.weights.plan import PushWish
from tests.support.world import TinySource

VALUES = Reply(200, b"[[0,0,0,0,0,0,0,0]]")


class Wire:
    """Answers reads as told, and anything else with values."""

    def __init__(self, info: Reply | Exception, values: Reply | Exception = VALUES) -> None:
        self.answers = {
            "/model_info": Reply(200, b'{"weight_version":"refitfsm:run:1"}'),
            "/server_info": info,
            "/get_weights_by_name": values,
        }
        self.asked: list[str] = []

    async def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        self.asked.append(path)
        answer = self.answers[path]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def aclose(self) -> None: ...


def verified(wire: Wire, source: TinySource | None) -> tuple[EventName, str]:
    """What the driver observes of a verification by sample."""
    driver = SGLangDriver(wire, "run", aside=inline)
    driver._capabilities = Capabilities("0.5.16")
    driver.load = source and Load(source, source.plan(PushWish()).chunks)

    async def life() -> tuple[EventName, str]:
        command = Command(CommandKind.VERIFY, version=1, level=VerifyLevel.SAMPLE)
        found = await driver.execute(Issued("s", 1, 1, command, asyncio.get_running_loop().time() + 60))
        return found.event, found.detail

    return asyncio.run(life())


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"quantization": "fp8"}, "quantization is 'fp8'"),
        ({"torchao_config": "int8wo"}, "torchao_config is 'int8wo'"),
        ({"dp_size": 2}, "data parallel attention"),
        ({"quantization": None, "torchao_config": "", "dp_size": 1}, ""),
        ({}, ""),
    ],
)
def test_values_that_are_not_foreseen_are_not_read(info: dict[str, object], why: str) -> None:
    """Quantised values are others than were pushed, and under data parallel attention rows are misplaced."""
    assert (why in unforeseen(info)) if why else unforeseen(info) == ""


def test_a_server_that_quantises_fails_a_sample_unread() -> None:
    """It is not accused of other weights: the message says why, and what to use."""
    wire = Wire(Reply(200, b'{"quantization":"fp8"}'))
    event, detail = verified(wire, TinySource(1))
    assert event is EventName.FAILED
    assert "holds other values than were pushed; use verify = checksum" in detail
    assert "/get_weights_by_name" not in wire.asked


def test_without_a_push_there_is_nothing_to_compare() -> None:
    """Weights that came back from the server's own memory are proved by the label alone."""
    wire = Wire(Reply(200, b'{"dp_size":1}'))
    assert verified(wire, None)[0] is EventName.VERIFIED
    assert wire.asked == ["/model_info"]


@pytest.mark.parametrize(
    ("info", "values", "event"),
    [
        (Reply(200, b'{"dp_size":1}'), VALUES, EventName.FAILED),
        (TimeoutError(), VALUES, EventName.LOST),
        (Reply(502, b""), VALUES, EventName.LOST),
        (Reply(200, b'{"dp_size":1}'), Reply(502, b""), EventName.LOST),
        (Reply(200, b'{"dp_size":1}'), NotSent("refused"), EventName.DIED),
    ],
)
def test_trouble_at_a_sample_is_an_observation(
    info: Reply | Exception, values: Reply | Exception, event: EventName
) -> None:
    """Other values fail; an answer that does not come proves nothing either way."""
    assert verified(Wire(info, values), TinySource(1))[0] is event


def test_a_source_that_cannot_say_its_values_fails() -> None:
    """A source is anybody's code: what it raises is named, with the tensor."""

    class Broken(TinySource):
        def head(self, name: str, count: int) -> tuple[float, ...]:
            raise RuntimeError("gone")

    event, detail = verified(Wire(Reply(200, b'{"dp_size":1}')), Broken(1))
    assert event is EventName.FAILED
    assert "read back: model.embed_tokens.weight: gone" in detail
