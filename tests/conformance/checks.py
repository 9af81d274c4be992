"""What the driver and the controller take for granted of a server, as checks that need no test runner.

The same checks run on the simulator in process, on the simulator over HTTP, and on real servers on CPU
and GPU. Where a simulator and a real server differ, the simulator is wrong.

A check gets a `Subject` that serves the weights of `source(0)` with its gate open, and leaves it so. The
lethal checks are in `lethal.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from refitfsm.errors import RequestFailed
from refitfsm.model.states import Tag
from refitfsm.model.values import CommandKind, EventName, VerifyLevel
from tests.conformance.subject import HELD_S, LONG_TOKENS, RUN, Subject, one_tensor

Check = Callable[[Subject], Awaitable[None]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


@check
async def enrolment_reads_the_server_and_stamps_it(subject: Subject) -> None:
    """Enrolling reads the dialect, and leaves a label by which the process is known again."""
    await subject.enrol()
    found = subject.capabilities
    assert found.sessions is (subject.version >= (0, 5, 21))
    assert found.tp_size >= 1
    assert found.model_path
    answer = await subject.greedy()
    meta = answer["meta_info"]
    assert isinstance(meta, dict)
    assert str(meta["weight_version"]).startswith(f"refitfsm:{RUN}:0:")


@check
async def pause_flush_and_continue_may_be_repeated(subject: Subject) -> None:
    """Each of the three ends well twice in a row, and the answers are the same after."""
    await subject.enrol()
    before = await subject.tokens()
    for kind in (CommandKind.PAUSE, CommandKind.FLUSH, CommandKind.CONTINUE):
        await subject.ok(kind)
        await subject.ok(kind)
    assert await subject.tokens() == before


@check
async def a_flush_is_refused_while_a_request_runs(subject: Subject) -> None:
    """A busy server refuses the flush, and the driver gives up before its deadline with its words."""
    await subject.enrol()
    request = await subject.running()
    observation = await subject.do(CommandKind.FLUSH, wait_s=1.1)
    assert observation.event is EventName.REFUSED, observation
    assert observation.detail.startswith("400")
    await request
    await subject.ok(CommandKind.FLUSH)


@check
async def a_pause_answers_running_requests_with_what_they_have(subject: Subject) -> None:
    """Pausing ends a running request with the finish reason abort and its tokens so far."""
    await subject.enrol()
    request = await subject.running()
    await subject.ok(CommandKind.PAUSE)
    answer = await request
    meta, tokens = answer["meta_info"], answer["output_ids"]
    assert isinstance(meta, dict)
    assert isinstance(tokens, list)
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(tokens) < LONG_TOKENS
    await subject.ok(CommandKind.FLUSH)
    await subject.ok(CommandKind.CONTINUE)


@check
async def a_paused_server_holds_requests(subject: Subject) -> None:
    """A request to a paused server waits for the continue and is answered then."""
    await subject.enrol()
    await subject.quiet()
    held = asyncio.create_task(subject.greedy())
    await asyncio.sleep(HELD_S)
    assert not held.done()
    await subject.ok(CommandKind.CONTINUE)
    assert (await held)["output_ids"] == await subject.tokens()


@check
async def a_push_in_chunks_changes_the_answers_and_back(subject: Subject) -> None:
    """New weights answer otherwise, the version reads back, and the old weights answer as before."""
    await subject.enrol()
    before = await subject.tokens()
    await subject.quiet()
    await subject.push(1, 1)
    assert (await subject.ok(CommandKind.VERIFY, version=1)).report.version == 1
    await subject.ok(CommandKind.FLUSH)
    await subject.ok(CommandKind.CONTINUE)
    assert await subject.tokens() != before
    await subject.quiet()
    await subject.restore(2)
    assert await subject.tokens() == before


@check
async def the_checksum_follows_the_weights(subject: Subject) -> None:
    """The checksum changes with the weights and comes back with them, where the server can make one."""
    await subject.enrol()
    first = await subject.do(CommandKind.VERIFY, level=VerifyLevel.CHECKSUM)
    if first.event is EventName.REFUSED:
        assert "checksum" in first.detail  # 0.5.16 on CPU cannot
        return
    await subject.quiet()
    await subject.push(1, 1)
    second = await subject.ok(CommandKind.VERIFY, level=VerifyLevel.CHECKSUM)
    await subject.push(0, 2)
    third = await subject.ok(CommandKind.VERIFY, level=VerifyLevel.CHECKSUM)
    assert first.report.checksum
    assert first.report.checksum == third.report.checksum != second.report.checksum
    await subject.ok(CommandKind.FLUSH)
    await subject.ok(CommandKind.CONTINUE)


@check
async def a_second_session_is_refused_and_known_as_open(subject: Subject) -> None:
    """Begin while a session is open is refused, and told apart from other refusals; end closes it once."""
    await subject.enrol()
    if not subject.capabilities.sessions:
        observation = await subject.do(CommandKind.BEGIN)
        assert observation.event is EventName.REFUSED, observation
        assert "404" in observation.detail
        return
    await subject.quiet()
    await subject.ok(CommandKind.BEGIN)
    observation = await subject.do(CommandKind.BEGIN)
    assert observation.event is EventName.REFUSED, observation
    assert observation.report.session_open
    await subject.ok(CommandKind.END)
    observation = await subject.do(CommandKind.END)
    assert observation.event is EventName.REFUSED, observation
    assert observation.report.session_closed
    await subject.restore(1)


@check
async def a_push_without_its_session_is_refused_and_changes_nothing(subject: Subject) -> None:
    """Where sessions exist, a push outside one is refused before its payload is looked at."""
    await subject.enrol()
    if not subject.capabilities.sessions:
        return
    before = await subject.tokens()
    await subject.quiet()
    load = subject.load(1)
    subject.driver.load = load
    observation = await subject.do(CommandKind.PUSH, version=1, chunk=0, chunks=len(load.chunks))
    assert observation.event is EventName.REFUSED, observation
    await subject.ok(CommandKind.CONTINUE)
    assert await subject.tokens() == before


@check
async def a_tensor_of_an_unknown_name_is_taken_in_silence(subject: Subject) -> None:
    """The server says success and changes nothing: only a manifest can find this."""
    await subject.enrol()
    before = await subject.tokens()
    if subject.capabilities.sessions:
        await subject.quiet()
        await subject.ok(CommandKind.BEGIN)
    reply = await subject.post("/update_weights_from_tensor", one_tensor(subject, "model.nope.weight"))
    assert (reply.status, msgspec.json.decode(reply.body)["success"]) == (200, True)
    if subject.capabilities.sessions:
        await subject.ok(CommandKind.END)
        await subject.ok(CommandKind.CONTINUE)
    assert await subject.tokens() == before


@check
async def another_process_at_the_address_is_found(subject: Subject) -> None:
    """A label that is not ours means that another process answers, before anything is done to it."""
    await subject.enrol()
    await subject.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    for kind in (CommandKind.PAUSE, CommandKind.RELEASE, CommandKind.RESUME, CommandKind.CONTINUE):
        observation = await subject.do(kind, tags=frozenset({Tag.WEIGHTS}))
        assert observation.event is EventName.DIED, (kind, observation)
        assert "another process" in observation.detail
    await subject.enrol()
    await subject.tokens()


@check
async def a_bad_request_is_an_error_with_the_servers_words(subject: Subject) -> None:
    """A prompt that is too long is answered with an error, and the server lives."""
    await subject.enrol()
    try:
        await subject.greedy(prompt=[7] * 5000)
    except RequestFailed as error:
        assert "400" in str(error)  # noqa: PT017 - no test runner here
    else:
        raise AssertionError("a prompt of 5,000 tokens was answered")
    await subject.tokens()


@check
async def a_colocated_cycle_is_right_and_strangers_wait(subject: Subject) -> None:
    """Release everything, resume in stages around a push: the answers are the new weights'.

    A stranger's request that came while the server was released waits, and is answered by them too.
    """
    await subject.enrol()
    if not subject.capabilities.memory_saver:
        return
    before = await subject.tokens()
    await subject.quiet()
    await subject.ok(CommandKind.RELEASE, tags=frozenset(Tag))
    stranger = asyncio.create_task(subject.greedy())
    await asyncio.sleep(HELD_S)
    await subject.ok(CommandKind.RESUME, tags=frozenset({Tag.WEIGHTS}))
    await subject.push(1, 1)
    await subject.ok(CommandKind.RESUME, tags=frozenset({Tag.KV_CACHE, Tag.CUDA_GRAPH}))
    await subject.ok(CommandKind.FLUSH)
    await subject.ok(CommandKind.CONTINUE)
    after = await subject.tokens()
    assert after != before
    assert (await stranger)["output_ids"] == after
    await subject.quiet()
    await subject.restore(2)
    assert await subject.tokens() == before


@check
async def a_paused_server_is_not_taken_over(subject: Subject) -> None:
    """Where the server can tell (0.5.20 and later), enrolling a paused one says so."""
    await subject.enrol()
    if subject.version < (0, 5, 20):
        return
    await subject.quiet()
    other = Subject(subject.transport, subject.source)
    observation = await other.do(CommandKind.ENROL, wait_s=7.0)
    assert observation.event is EventName.ENROLLED, observation
    assert observation.report.paused
    await subject.ok(CommandKind.CONTINUE)
