"""The way to a broken law, as lines that a person can follow."""

from collections.abc import Iterator

from refitfsm.check.moves import Move
from refitfsm.check.search import Broken
from refitfsm.model.values import ServerView


def script(found: Broken) -> Iterator[str]:
    """One line for each thing that happens, with what is believed of every server before it; the law last."""
    for number, move in enumerate(found.trace, start=1):
        views = "; ".join(_shown(view) for view in move.state.fleet.servers.values())
        yield f"{number:3}  {_subject(move)}{move.name:40}  {views}"
    yield f"     breaks {found.law}"


def _subject(move: Move) -> str:
    return f"{move.server}: " if move.server else ""


def _shown(view: ServerView) -> str:
    content = view.content
    words = [view.state.value, f"{content.kind} {content.version}" if content.version >= 0 else content.kind]
    words += ["paused"] if view.paused else []
    words += ["session"] if view.session else []
    words += [view.condition.value] if view.condition.value != "healthy" else []
    words += [f"gate {view.gate}"]
    words += [f"<- {view.pending.command.kind}"] if view.pending else []
    return f"{view.server} {', '.join(words)}"
