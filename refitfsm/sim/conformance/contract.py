"""What the driver and the controller take for granted of a server that is treated well."""

import asyncio
from typing import Final

from refitfsm.errors import RequestFailed
from refitfsm.model.states import Tag
from refitfsm.model.values import CommandKind, EventName, VerifyLevel
from refitfsm.sim.conformance.expect import Broken, NotHere, differ, expect, same
from refitfsm.sim.conformance.registry import Area, Need, check, version_of
from refitfsm.sim.conformance.subject import LONG_TOKENS, RUN, Subject, zeros

_SESSIONS: Final = (0, 5, 21)


@check(Area.DRIVER)
async def enrolment_reads_the_server_and_stamps_it(subject: Subject) -> None:
    """Enrolling reads the dialect, and leaves a label by which the process is known again."""
    found = subject.capabilities
    same(found.sessions, version_of(found) >= _SESSIONS, "whether there are sessions")
    expect(found.tp_size >= 1, f"tp_size is {found.tp_size}")
    expect(found.model_path, "there is no model path")
    label = str((await subject.generate()).meta["weight_version"])
    expect(label.startswith(f"refitfsm:{RUN}:0:"), f"the label is {label}")


@check(Area.DRIVER)
async def pause_flush_and_continue_may_be_repeated(subject: Subject) -> None:
    """Each of the three ends well twice in a row, and the answers are the same after."""
    before = await subject.tokens()
    for kind in (CommandKind.PAUSE, CommandKind.FLUSH, CommandKind.CONTINUE):
        await subject.ok(kind)
        await subject.ok(kind)
    same(await subject.tokens(), before, "the answer")


@check(Area.DRIVER)
async def a_flush_is_refused_while_a_request_runs(subject: Subject) -> None:
    """A busy server refuses the flush, and the driver gives up before its deadline with its words."""
    request = await subject.running()
    observation = await subject.refused(CommandKind.FLUSH, wait_s=1.1)
    expect(observation.detail.startswith("400"), f"the reason is {observation.detail}")
    await request
    await subject.ok(CommandKind.FLUSH)


@check(Area.DRIVER)
async def a_pause_answers_running_requests_with_what_they_have(subject: Subject) -> None:
    """Pausing ends a running request with the finish reason abort and its tokens so far."""
    request = await subject.running()
    await subject.ok(CommandKind.PAUSE)
    answer = await request
    same(answer.finish, "abort", "the finish reason")
    expect(0 < len(answer.tokens) < LONG_TOKENS, f"it has {len(answer.tokens)} tokens")
    await subject.go_on()


@check(Area.DRIVER)
async def a_paused_server_holds_requests(subject: Subject) -> None:
    """A request to a paused server waits for the continue and is answered then."""
    await subject.quiet()
    request = asyncio.create_task(subject.generate())
    await subject.held(request)
    await subject.ok(CommandKind.CONTINUE)
    same((await request).tokens, await subject.tokens(), "the held answer")


@check(Area.DRIVER)
async def a_push_in_chunks_changes_the_answers_and_back(subject: Subject) -> None:
    """New weights answer otherwise, the version reads back, and the old weights answer as before."""
    before = await subject.tokens()
    await subject.quiet()
    await subject.push(1, 1)
    same((await subject.ok(CommandKind.VERIFY, version=1)).report.version, 1, "the version")
    await subject.go_on()
    differ(await subject.tokens(), before, "the answers of two sets of weights")
    await subject.quiet()
    await subject.restore(2)
    same(await subject.tokens(), before, "the answer")


@check(Area.DRIVER)
async def the_checksum_follows_the_weights(subject: Subject) -> None:
    """The checksum changes with the weights and comes back with them."""
    first = await subject.do(CommandKind.VERIFY, level=VerifyLevel.CHECKSUM)
    if first.event is EventName.REFUSED:
        raise NotHere(f"this server makes no checksum: {first.detail[:80]}")  # 0.5.16 on CPU
    await subject.quiet()
    await subject.push(1, 1)
    second = await subject.ok(CommandKind.VERIFY, level=VerifyLevel.CHECKSUM)
    await subject.push(0, 2)
    third = await subject.ok(CommandKind.VERIFY, level=VerifyLevel.CHECKSUM)
    expect(first.report.checksum, "there is no checksum")
    differ(first.report.checksum, second.report.checksum, "the checksums of two sets of weights")
    same(third.report.checksum, first.report.checksum, "the checksum of the first weights")
    await subject.go_on()


@check(Area.DRIVER, before=_SESSIONS)
async def where_there_are_no_sessions_a_begin_is_refused(subject: Subject) -> None:
    """Without sessions, begin is a path that is not there."""
    observation = await subject.refused(CommandKind.BEGIN)
    expect("404" in observation.detail, f"the reason is {observation.detail}")


@check(Area.DRIVER, since=_SESSIONS)
async def a_second_session_is_refused_and_known_as_open(subject: Subject) -> None:
    """Begin while a session is open is refused, and told apart from other refusals; end closes it once."""
    await subject.quiet()
    await subject.ok(CommandKind.BEGIN)
    expect((await subject.refused(CommandKind.BEGIN)).report.session_open, "it is not known as open")
    await subject.ok(CommandKind.END)
    expect((await subject.refused(CommandKind.END)).report.session_closed, "it is not known as closed")
    await subject.restore(1)


@check(Area.DRIVER, since=_SESSIONS)
async def a_push_without_its_session_is_refused_and_changes_nothing(subject: Subject) -> None:
    """Where sessions exist, a push outside one is refused before its payload is looked at."""
    before = await subject.tokens()
    await subject.quiet()
    load = subject.load(1)
    subject.driver.load = load
    await subject.refused(CommandKind.PUSH, version=1, chunk=0, chunks=len(load.chunks))
    await subject.ok(CommandKind.CONTINUE)
    same(await subject.tokens(), before, "the answer")


@check(Area.DRIVER)
async def a_tensor_of_an_unknown_name_is_taken_in_silence(subject: Subject) -> None:
    """The server says success and changes nothing: only a manifest can find this."""
    before = await subject.tokens()
    await subject.quiet()
    async with subject.session():
        entry = zeros(("model.nope.weight", (4,)))
        answer = await subject.well("/update_weights_from_tensor", subject.update(entry))
        same(answer.fields["success"], True, "success")
    await subject.ok(CommandKind.CONTINUE)
    same(await subject.tokens(), before, "the answer")


@check(Area.DRIVER)
async def another_process_at_the_address_is_found(subject: Subject) -> None:
    """A label that is not ours means that another process answers, before anything is done to it."""
    await subject.well("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    for kind in (CommandKind.PAUSE, CommandKind.RELEASE, CommandKind.RESUME, CommandKind.CONTINUE):
        observation = await subject.do(kind, tags=frozenset({Tag.WEIGHTS}))
        expect(observation.event is EventName.DIED, f"{kind} ended as {observation}")
        expect("another process" in observation.detail, f"the reason is {observation.detail}")
    await subject.enrol()
    await subject.tokens()


@check(Area.DRIVER)
async def a_bad_request_is_an_error_with_the_servers_words(subject: Subject) -> None:
    """A prompt that is too long is answered with an error, and the server lives."""
    body = b'{"input_ids": [' + b"7," * 5000 + b'7], "sampling_params": {"max_new_tokens": 1}}'
    try:
        await subject.driver.generate(body, 60.0)
    except RequestFailed as error:
        expect("400" in str(error), f"the reason is {error}")
    else:
        raise Broken("a prompt of 5,001 tokens was answered")
    await subject.tokens()


@check(Area.DRIVER, needs=Need.SAVER)
async def a_colocated_cycle_is_right_and_strangers_wait(subject: Subject) -> None:
    """Release everything, resume in stages around a push: the answers are the new weights'.

    A stranger's request that came while the server was released waits, and is answered by them too.
    """
    before = await subject.tokens()
    await subject.quiet()
    await subject.ok(CommandKind.RELEASE, tags=frozenset(Tag))
    stranger = asyncio.create_task(subject.generate())
    await subject.held(stranger)
    await subject.ok(CommandKind.RESUME, tags=frozenset({Tag.WEIGHTS}))
    await subject.push(1, 1)
    await subject.ok(CommandKind.RESUME, tags=frozenset({Tag.KV_CACHE, Tag.CUDA_GRAPH}))
    await subject.go_on()
    after = await subject.tokens()
    differ(after, before, "the answers of two sets of weights")
    same((await stranger).tokens, after, "the stranger's answer")
    await subject.quiet()
    await subject.restore(2)
    same(await subject.tokens(), before, "the answer")


@check(Area.DRIVER, since=(0, 5, 20))
async def a_paused_server_is_not_taken_over(subject: Subject) -> None:
    """Where the server can tell, enrolling a paused one says so."""
    await subject.quiet()
    other = Subject(subject.transport, subject.source)
    observation = await other.ok(CommandKind.ENROL, wait_s=7.0)
    expect(observation.report.paused, "it is not known as paused")
    await subject.ok(CommandKind.CONTINUE)
