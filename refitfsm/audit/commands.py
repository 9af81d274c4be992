"""Judge what a command asks for, where the table does not: that it is this cycle's, and this policy's."""

from refitfsm.audit.broken import Broken
from refitfsm.model.fleet import Cycle
from refitfsm.model.rules import Rules
from refitfsm.model.states import ContentKind, Tag
from refitfsm.model.values import Command, CommandKind, Event, ServerView


def check_command(view: ServerView, event: Event, cycle: Cycle, rules: Rules, at_s: float) -> None:
    """A command that was issued to a server of which this was believed.

    Raises:
        Broken: it asks for something else than its cycle and its policy do, or has another deadline.
    """
    command = event.command
    if command is None or command.kind.value != event.name.value:
        raise Broken(f"{view.server}: {event.name} has another command")
    if command != _expected(command.kind, view, cycle, rules):
        raise Broken(f"{view.server}: {command} is not what cycle {cycle.id} asks for")
    wait_s = rules.deadline_s(command.kind) + command.chunk_bytes / rules.push_bytes_per_s
    deadline_s = min(at_s + wait_s, cycle.closes_s)
    if event != Event(event.name, command, cycle.id, deadline_s=deadline_s):
        raise Broken(f"{view.server}: {event.name} has another deadline than the policy's, or more in it")


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
