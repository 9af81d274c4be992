"""What a server truly is, in the abstract, and what it does with a command.

The least that SGLang's deaths and wrong answers depend on: `sim.truth` is the same in full. Whenever a
server is not paused somebody uses it, a stranger or a probe: its cache fills, and released memory kills it.
"""

from collections.abc import Callable
from typing import NamedTuple

from refitfsm.model.states import ALL_TAGS, Tag
from refitfsm.model.values import (
    DONE,
    NOTHING_REPORTED,
    Capabilities,
    Command,
    CommandKind,
    EventName,
    Pending,
    Report,
    VerifyLevel,
)

UNDEFINED = -1
"""Stands where the number of a push would: bytes of none, or of several."""


class TrueServer(NamedTuple):
    """One server, as it is."""

    alive: bool = True
    same: bool = True
    """It is the process that was enrolled, and not one that was started in its place."""
    resident: frozenset[Tag] = ALL_TAGS
    chunks: tuple[int, ...] = (0, 0)
    """Of each chunk of the model, the cycle that pushed what is in memory; 0: it was there at the start.

    Not the version: a trainer may give other weights under the version of a push that failed."""
    label: int = 0
    """The version that it says it has; -1: none of ours."""
    cache: frozenset[int] = frozenset({0})
    """The pushes of the weights that made what is cached."""
    paused: bool = False
    session: bool = False

    @property
    def push(self) -> int:
        """The one push that all of its weights are of, or `UNDEFINED` where they are mixed or gone."""
        first = self.chunks[0]
        return first if all(each == first for each in self.chunks) else UNDEFINED


class Reply(NamedTuple):
    """What came of a command."""

    server: TrueServer
    event: EventName
    report: Report = NOTHING_REPORTED
    fatal: str = ""
    """Why the server died of it."""


_IDENTIFIED = frozenset(CommandKind) - {
    CommandKind.ENROL,
    CommandKind.DRAIN,
    CommandKind.FLUSH,
    CommandKind.VERIFY,
}
"""Commands before which the driver makes sure that it speaks to the process that was enrolled."""


def carry_out(server: TrueServer, pending: Pending, able: Capabilities, expected: int | None) -> Reply:
    """What a command does to a server, and what the driver reports of it, without any fault.

    Args:
        expected: the push whose weights the trainer has to compare with, if it has any.
    """
    command = pending.command
    kind = command.kind
    if kind is CommandKind.DRAIN:  # nothing is sent
        return Reply(server, EventName.DRAINED)
    if not server.alive or (kind in _IDENTIFIED and not server.same):
        return Reply(server, EventName.DIED)
    reason = _kills(server, command, able)
    if reason:
        return Reply(dead(server), EventName.DIED, fatal=reason)
    refused = _refuses(server, command, able)
    if refused is not None:
        return Reply(server, EventName.REFUSED, refused)
    after = in_use(_changed(server, pending, able))
    event, report = _answer(after, command, able, expected)
    if after.alive:
        return Reply(after, event, report)
    return Reply(after, EventName.DIED, fatal="it went on while memory was released")


def dead(server: TrueServer) -> TrueServer:
    """A process that is gone; what it held does not matter any more."""
    nothing = (UNDEFINED,) * len(server.chunks)
    return TrueServer(alive=False, same=server.same, chunks=nothing, label=UNDEFINED, cache=frozenset())


def started(chunks: int) -> TrueServer:
    """A new process at the same address, with its start-up weights."""
    return TrueServer(same=False, chunks=(0,) * chunks, label=UNDEFINED)


def in_use(server: TrueServer) -> TrueServer:
    """The same server after requests had their chance."""
    if server.paused or not server.alive:
        return server
    if server.resident != ALL_TAGS:
        return dead(server)
    return server._replace(cache=server.cache | {server.push})


_Deadly = Callable[[TrueServer, Command, Capabilities], bool]


def _gone(server: TrueServer, _command: Command, _able: Capabilities) -> bool:
    return Tag.WEIGHTS not in server.resident


_DEADLY: tuple[tuple[CommandKind, _Deadly, str], ...] = (
    (CommandKind.FLUSH, lambda s, _c, _a: Tag.KV_CACHE not in s.resident, "a flush of a released cache"),
    (CommandKind.RELEASE, lambda s, _c, _a: not s.paused, "a release while requests run"),
    (CommandKind.RELEASE, lambda s, c, _a: not c.tags <= s.resident, "a release of what is released"),
    (CommandKind.RELEASE, lambda _s, _c, a: not a.memory_saver, "a release without the memory saver"),
    (CommandKind.RESUME, lambda s, c, _a: bool(c.tags & s.resident), "a resume of what is resident"),
    (CommandKind.BEGIN, _gone, "a session while the weights are released"),
    (CommandKind.PUSH, _gone, "a push while the weights are released"),
    (CommandKind.END, _gone, "a session's end while the weights are released"),
    (
        CommandKind.VERIFY,
        lambda s, c, a: c.level is not VerifyLevel.VERSION and _gone(s, c, a),
        "a look at weights that are released",
    ),
)
"""What a real server dies of."""


def _kills(server: TrueServer, command: Command, able: Capabilities) -> str:
    for kind, deadly, reason in _DEADLY:
        if kind is command.kind and deadly(server, command, able):
            return reason
    return ""


def _refuses(server: TrueServer, command: Command, able: Capabilities) -> Report | None:
    kind = command.kind
    if kind is CommandKind.BEGIN and server.session:
        return Report(session_open=True)
    if kind is CommandKind.END and not server.session:
        return Report(session_closed=True)
    if kind is CommandKind.PUSH and able.sessions and not server.session:
        return NOTHING_REPORTED
    return None


def _released(server: TrueServer, tags: frozenset[Tag], able: Capabilities) -> TrueServer:
    lost = Tag.WEIGHTS in tags and not able.weights_backup
    return server._replace(
        resident=server.resident - tags,
        chunks=(UNDEFINED,) * len(server.chunks) if lost else server.chunks,
        cache=frozenset() if Tag.KV_CACHE in tags else server.cache,
    )


def _pushed(server: TrueServer, pending: Pending) -> TrueServer:
    chunk, last = pending.command.chunk, pending.command.chunk + 1 == pending.command.chunks
    return server._replace(
        chunks=(*server.chunks[:chunk], pending.cycle, *server.chunks[chunk + 1 :]),
        label=pending.command.version if last else server.label,
    )


_CHANGES: dict[CommandKind, Callable[[TrueServer, Pending, Capabilities], TrueServer]] = {
    CommandKind.PAUSE: lambda s, _p, _a: s._replace(paused=True),
    CommandKind.FLUSH: lambda s, _p, _a: s._replace(cache=frozenset()),
    CommandKind.RELEASE: lambda s, p, a: _released(s, p.command.tags, a),
    CommandKind.RESUME: lambda s, p, _a: s._replace(resident=s.resident | p.command.tags),
    CommandKind.BEGIN: lambda s, _p, _a: s._replace(session=True),
    CommandKind.PUSH: lambda s, p, _a: _pushed(s, p),
    CommandKind.END: lambda s, _p, _a: s._replace(session=False),
    CommandKind.CONTINUE: lambda s, _p, _a: s._replace(paused=False),
}


def _changed(server: TrueServer, pending: Pending, able: Capabilities) -> TrueServer:
    change = _CHANGES.get(pending.command.kind)
    return change(server, pending, able) if change else server


def _answer(
    server: TrueServer, command: Command, able: Capabilities, expected: int | None
) -> tuple[EventName, Report]:
    kind = command.kind
    if kind is CommandKind.ENROL:
        return EventName.ENROLLED, Report(capabilities=able, paused=server.paused)
    if kind is not CommandKind.VERIFY:
        return DONE[kind], NOTHING_REPORTED
    compares = command.level in (VerifyLevel.CONTENT, VerifyLevel.SAMPLE)
    if compares and expected is not None and server.push != expected:
        return EventName.FAILED, NOTHING_REPORTED
    checksum = str(server.push) if command.level.needs_checksums else ""
    return EventName.VERIFIED, Report(version=server.label, checksum=checksum)
