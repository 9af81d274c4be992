"""Judge what a command asks for, where the table does not: that it is this cycle's, and this policy's."""

from collections.abc import Mapping

from refitfsm.audit.broken import Broken
from refitfsm.model.fleet import Cycle, Goal, Phase
from refitfsm.model.rules import Rules
from refitfsm.model.states import ContentKind, Tag
from refitfsm.model.values import NOTHING_REPORTED, Command, CommandKind, Event, ServerView

_K = CommandKind
_STAGING = frozenset({_K.DRAIN, _K.PAUSE, _K.FLUSH, _K.RESUME, _K.BEGIN, _K.PUSH, _K.END, _K.VERIFY})
_TOWARD: Mapping[Goal, frozenset[CommandKind]] = {
    Goal.ENROL: frozenset({_K.ENROL}),
    Goal.RELEASE: frozenset({_K.DRAIN, _K.PAUSE, _K.END, _K.FLUSH, _K.RELEASE}),
    Goal.RESUME: frozenset({_K.DRAIN, _K.RESUME, _K.END, _K.VERIFY, _K.FLUSH}),
    Goal.REFIT: _STAGING,
    Goal.STAGE: _STAGING,
    Goal.COMMIT: frozenset({_K.RESUME, _K.FLUSH}),
    Goal.FLUSH: frozenset({_K.DRAIN, _K.PAUSE, _K.FLUSH}),
}
"""What may lead to a goal. Nobody goes on before the commit."""
_BACK = frozenset({_K.DRAIN, _K.FLUSH, _K.CONTINUE})
"""What may lead back from a goal that is given up."""


def _may_be_asked(cycle: Cycle) -> frozenset[CommandKind]:
    if cycle.phase is Phase.WORKING:
        return _TOWARD[cycle.goal]
    return _BACK if cycle.phase is Phase.ABORTING else frozenset({_K.CONTINUE})


class CommandAudit:
    """What a policy lets a cycle ask of servers."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._deadlines_s = dict(rules.deadlines_s)

    def check(self, view: ServerView, event: Event, cycle: Cycle, at_s: float) -> None:
        """A command that was issued to a server of which this was believed.

        Raises:
            Broken: it asks for something else than its cycle and its policy do, or has another deadline.
        """
        command = event.command
        if command is None or command.kind.value != event.name.value:
            raise Broken(f"{view.server}: {event.name} has another command")
        kind = command.kind
        if kind not in _may_be_asked(cycle):
            raise Broken(f"{view.server}: {kind} is no part of a {cycle.goal} that is {cycle.phase}")
        if command != _expected(kind, view, cycle, self._rules):
            raise Broken(f"{view.server}: {command} is not what cycle {cycle.id} asks for")
        wait_s = self._deadlines_s[kind] + command.chunk_bytes / self._rules.push_bytes_per_s
        if event.deadline_s != min(at_s + wait_s, cycle.closes_s):
            raise Broken(f"{view.server}: {event.name} has another deadline than the policy's")
        if event.seq or event.detail or event.report != NOTHING_REPORTED:
            raise Broken(f"{view.server}: {event.name} has an answer's fields")


def _expected(kind: CommandKind, view: ServerView, cycle: Cycle, rules: Rules) -> Command:
    if kind is CommandKind.RELEASE:
        return Command(kind, tags=rules.release_tags & view.resident)
    if kind is CommandKind.RESUME:
        first = Tag.WEIGHTS in view.released
        return Command(kind, tags=frozenset({Tag.WEIGHTS}) if first else view.released)
    if kind is CommandKind.PUSH:
        content, chunks = view.content, len(cycle.chunk_bytes)
        goes_on = content.kind is ContentKind.PARTIAL and content.cycle == cycle.id
        chunk = content.chunks_done if goes_on else 0
        if chunk >= chunks:
            raise Broken(f"{view.server}: all {chunks} chunks of cycle {cycle.id} were pushed already")
        return Command(kind, frozenset(), cycle.version, chunk, chunks, cycle.chunk_bytes[chunk])
    if kind is CommandKind.VERIFY:
        return Command(kind, version=cycle.version, level=rules.verify)
    return Command(kind, version=view.content.version if kind is CommandKind.CONTINUE else 0)
