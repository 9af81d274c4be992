"""Random sequences of calls, played to a server and to the simulator of the same release.

A sequence is drawn, played to a fresh simulated server on the virtual clock, then to the server. Every
answer, every call that is held, and every death is compared. Where it is chance what the simulated server
does, the sequence is passed over. A call that it holds is held by the other if it is not answered a short
while later; what it answers once it is let go counts as well.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from refitfsm.drivers.transport import AnswerLost, NotSent, TransportError, Unreachable
from refitfsm.model.states import Tag
from refitfsm.model.values import Capabilities
from refitfsm.sim.choices import CalmChooser, Chooser, SeededChooser
from refitfsm.sim.config import SimConfig
from refitfsm.sim.conformance.calls import ASK, CALLS, DEAD, Call, made
from refitfsm.sim.conformance.expect import Broken
from refitfsm.sim.conformance.runner import Maker
from refitfsm.sim.conformance.subject import Subject
from refitfsm.sim.loop import run
from refitfsm.sim.profiles import profile_for
from refitfsm.sim.server import SimServer
from refitfsm.sim.tiny import TinyWeights
from refitfsm.sim.transport import SimTransport

HELD: Final = "held"
LET_GO: Final = "let go"
SEEDS: Final = 3
LONGEST: Final = 10
"""Calls in a sequence."""
SIM_PATIENCE_S: Final = 1.5
"""On the virtual clock: longer than anything takes but a request for much, and a request that is held."""
PATIENCE_S: Final = 0.4
ANSWER_S: Final = 60.0
DEATH_S: Final = 20.0
SLOW_S: Final = 0.03
"""Each step of a request takes so much longer, so that one for much outlasts its sequence."""
REST_S: Final = 10 * SLOW_S
"""After each call. A short request that was let go ends meanwhile, and an answered one leaves the batch."""


class Predicted(NamedTuple):
    """What the simulator does with a sequence."""

    says: tuple[str, ...]
    """Of each call that was made; the last one may be the server's death."""
    late: tuple[str, ...]
    """Of letting go, of each call that was held, and of whose weights are there. Empty after a death."""
    listed: tuple[str, ...]
    """The tags that are released after the calls."""
    session: bool
    """One is open when all is said."""
    spoilt: bool
    """The weights are others, or gone."""


class Difference(NamedTuple):
    """A call that the two servers answer otherwise."""

    calls: tuple[str, ...]
    """Up to the one that differs; all of them where it is what a held one answers once it is let go."""
    simulated: str
    real: str


def twin(capabilities: Capabilities) -> SimConfig:
    """The simulated server that a real one is compared with.

    Raises:
        ValueError: its release is not simulated.
    """
    profile_for(capabilities.sglang_version)
    return SimConfig(
        sglang_version=capabilities.sglang_version,
        memory_saver=capabilities.memory_saver,
        weights_cpu_backup=capabilities.weights_backup,
        device="cpu" if capabilities.on_cpu else "cuda",
        skip_warmup=True,
    )


def drawn(number: int) -> tuple[Call, ...]:
    """The calls of one sequence; the same number gives the same ones."""
    chooser = SeededChooser(number)
    bag = [call for call in CALLS for _ in range(call.weight)]
    length = 3 + chooser.choose("length", LONGEST - 2)
    return tuple(bag[chooser.choose("call", len(bag))] for _ in range(length))


async def _step(call: Call, subject: Subject, patience_s: float) -> "tuple[str, asyncio.Task[str]]":
    """Make a call; `HELD` if it is not answered in time.

    A request leaves the batch some steps after its answer, and it is chance whether the next call finds it
    there: so that comes after them.
    """
    task = asyncio.create_task(made(call, subject))
    await asyncio.wait({task}, timeout=patience_s)
    await asyncio.sleep(REST_S)
    return (task.result() if task.done() else HELD), task


async def _ready(subject: Subject) -> None:
    """Where each sequence starts: enrolled, idle, each step slow, and known by its answer."""
    await subject.enrol()
    await subject.idle()
    subject.own_tokens = tuple(await subject.tokens())
    await subject.idle()
    await subject.well("/slow_down", {"forward_sleep_time": SLOW_S})


class _Slowest:
    """Whatever may take long does."""

    def choose(self, label: str, options: int) -> int:  # noqa: ARG002
        return options - 1


def predict(calls: Sequence[Call], config: SimConfig) -> Predicted | None:
    """What a fresh simulated server does with a sequence; None where that is chance."""
    choosers: tuple[Chooser, ...] = (CalmChooser(), _Slowest(), *map(SeededChooser, range(SEEDS)))
    found = {_predict(calls, config, chooser) for chooser in choosers}
    return found.pop() if len(found) == 1 else None


def _predict(calls: Sequence[Call], config: SimConfig, chooser: Chooser) -> Predicted:
    async def life() -> Predicted:
        server = SimServer(config, name="subject", chooser=chooser)
        subject = Subject(SimTransport(server), TinyWeights)
        await _ready(subject)
        began = server.truth.weights.digest()
        says, waiting = [], []
        for call in calls:
            said, task = await _step(call, subject, SIM_PATIENCE_S)
            if server.engine.scheduler.dying is not None:
                said = DEAD
            says.append(said)
            if said == DEAD:
                task.cancel()
                break
            if said == HELD:
                waiting.append(task)
        truth = server.truth
        listed = tuple(sorted(truth.memory.listed))
        late: tuple[str, ...] = ()
        if says[-1] != DEAD:
            late = (await _let_go(subject, listed),)
            if late == (LET_GO,):
                late += (*[await task for task in waiting], await made(ASK, subject))
        for task in waiting:
            task.cancel()
        spoilt = truth.weights.digest() != began
        return Predicted(tuple(says), late, listed, truth.session is not None, spoilt)

    return run(life())


async def _let_go(subject: Subject, listed: Sequence[str]) -> str:
    """Nothing is held any more, and nothing runs: `LET_GO`, or `DEAD`. Memory is taken back first."""
    try:
        if listed:
            await subject.well("/pause_generation", {})
            await subject.well("/resume_memory_occupation", {"tags": list(listed)})
        await subject.well("/abort_request", {"abort_all": True})
        await subject.well("/continue_generation", {})
        await subject.well("/abort_request", {"abort_all": True})
        await subject.idle()
        await subject.well("/slow_down", {"forward_sleep_time": None})
    except TransportError:
        return DEAD
    except (Broken, TimeoutError) as error:
        return f"does not come to rest: {error}"
    return LET_GO


async def _is_gone(subject: Subject) -> bool:
    """Whether the server goes within its time: a scheduler that died is noticed seconds later."""
    try:
        async with asyncio.timeout(DEATH_S):
            while True:
                with suppress(AnswerLost, Unreachable):
                    await subject.get("/model_info")
                await asyncio.sleep(PATIENCE_S)
    except NotSent:
        return True
    except TimeoutError:
        return False


async def _play(calls: Sequence[Call], expected: Predicted, subject: Subject) -> tuple[list[str], bool]:
    """Play a sequence to the other server. Returns what it said, and whether it can be used again."""
    says: list[str] = []
    waiting = []
    try:
        await _ready(subject)
    except (Broken, TransportError, TimeoutError) as error:
        return [f"is not as at its start: {error}"], False
    for call, wanted in zip(calls, expected.says, strict=False):
        said, task = await _step(call, subject, ANSWER_S if wanted not in {HELD, DEAD} else PATIENCE_S)
        if wanted == DEAD and await _is_gone(subject):
            said = DEAD
        says.append(said)
        if said == HELD:
            waiting.append(task)
        if said != wanted or said == DEAD:
            for each in (task, *waiting):
                each.cancel()
            await asyncio.gather(task, *waiting, return_exceptions=True)
            return says, False
    says.append(await _let_go(subject, expected.listed))
    if says[-1] != LET_GO:
        return says, False
    says += [*[await task for task in waiting], await made(ASK, subject)]
    return says, await _mended(expected, subject)


async def _mended(expected: Predicted, subject: Subject) -> bool:
    """Put a server back to where sequences start. Whether it is there."""
    try:
        if expected.session:
            await subject.well("/end_weight_update", {})
        await subject.enrol()
        if expected.spoilt or Tag.WEIGHTS in expected.listed:
            await subject.quiet()
            await subject.push(0, 1)
            await subject.go_on()
        return tuple(await subject.tokens()) == subject.own_tokens
    except (Broken, TransportError, TimeoutError):
        return False


class Sequenced(NamedTuple):
    """A sequence, and what the simulator does with it."""

    number: int
    calls: tuple[Call, ...]
    predicted: Predicted

    @property
    def kills(self) -> bool:
        return DEAD in (*self.predicted.says, *self.predicted.late)


class Played(NamedTuple):
    """A sequence on a server."""

    sequence: Sequenced
    said: tuple[str, ...]
    difference: Difference | None


def planned(config: SimConfig, sequences: int, *, first: int = 0, deaths_max: int = 20) -> list[Sequenced]:
    """So many sequences, of which so many kill at most: others that do, or that are chance, are passed over.

    Args:
        first: the number of the first sequence.
    """
    found: list[Sequenced] = []
    deaths, number = 0, first
    while len(found) < sequences:
        calls = drawn(number)
        predicted = predict(calls, config)
        each = predicted and Sequenced(number, calls, predicted)
        if each and (not each.kills or deaths < deaths_max):
            deaths += each.kills
            found.append(each)
        number += 1
    return found


async def compare(make: Maker, sequences: Sequence[Sequenced]) -> AsyncIterator[Played]:
    """Play sequences to a server; after a death, and after a difference, to a new one."""
    todo = list(sequences)
    while todo:
        async with make() as subject:
            async for played in compare_shared(subject, todo):
                todo = todo[1:]
                yield played


async def compare_shared(subject: Subject, sequences: Sequence[Sequenced]) -> AsyncIterator[Played]:
    """Play sequences to a server that cannot be started again, up to the first after which it should be."""
    for each in sequences:
        said, good = await _play(each.calls, each.predicted, subject)
        yield Played(each, tuple(said), _difference(each, said))
        if not good:
            return


def _difference(sequence: Sequenced, said: Sequence[str]) -> Difference | None:
    names = tuple(call.name for call in sequence.calls)
    expected = (*sequence.predicted.says, *sequence.predicted.late)
    for at, (wanted, found) in enumerate(zip(expected, said, strict=False)):
        if wanted != found:
            return Difference(names[: at + 1], wanted, found)
    return None
