"""Numbers as they matter beside what the fleet knows: a server's view and truth, for many histories at once.

Cycles and versions are only compared: with those that the fleet's centre holds, and within one server. So
the centre's get standing codes, and whatever is older is `STALE`: a push that is whole and believed, or of no
account. Of a command's number it only matters whether an answer is to it, and of times whether they came.
"""

from collections.abc import Iterable
from typing import NamedTuple

from refitfsm.check.moves import is_out
from refitfsm.check.truth import UNDEFINED, TrueServer
from refitfsm.model.states import Condition, ContentKind, ServerState
from refitfsm.model.values import Command, CommandKind, Content, Pending, ServerView

DEADLINE_S, CLOSES_S = 1.0, 2.0
STALE = 1
"""A cycle that the centre does not know any more."""
FOREIGN = -1
"""A session that is not the open cycle's."""
_SPACING = 100
_SERVED = 50
"""Stands for the version that the fleet serves, once it serves another than servers start with."""
_GONE = TrueServer(alive=False)
_OUT = {
    True: ServerView("", seq=1),
    False: ServerView("", state=ServerState.RELEASED, paused=True, condition=Condition.SUSPECT, seq=1),
}
"""Of a server that is offline, and of a suspect: the same whatever led there."""


class Codes(NamedTuple):
    """The numbers of one moment, and what stands for them."""

    serving_version: int
    cycles: tuple[tuple[int, int], ...]
    """The centre's cycles with their codes."""
    open_cycle: int
    attempts_max: int

    @classmethod
    def of(cls, serving_version: int, cycles: Iterable[int], open_cycle: int, attempts_max: int) -> "Codes":
        known = sorted({*cycles, open_cycle} - {0})
        numbered = ((each, _SPACING * rank) for rank, each in enumerate(known, start=1))
        return cls(serving_version, ((0, 0), *numbered), open_cycle, attempts_max)

    def cycle(self, number: int) -> int:
        """A cycle that the centre holds."""
        return dict(self.cycles).get(number, STALE)

    def version(self, number: int) -> int:
        """A version: none, an older one, the one served, or the next."""
        served = _SERVED if self.serving_version else 0
        if number < 0:
            return number
        return served + min(1, max(-1, number - self.serving_version))

    def view(self, view: ServerView) -> ServerView:
        """What is believed of a server, in these codes."""
        if is_out(view):
            return _OUT[view.state is ServerState.OFFLINE]
        pending = view.pending
        return view._replace(
            server="",
            content=self._content(view.content),
            kv_epoch=self._kv_epoch(view),
            session=self._session(view.session),
            pending=pending and self._pending(pending),
            seq=1,
            attempts=min(view.attempts, self.attempts_max),
            checksum=str(self.cycle(int(view.checksum))) if view.checksum else "",
            reason="",
        )

    def true(self, true: TrueServer, believed: ServerView) -> TrueServer:
        """What a server is, in these codes; `believed` is its view before it was coded."""
        if is_out(believed):
            return _GONE
        push = true.push
        known = {number for number, _ in self.cycles}
        if push != UNDEFINED:
            whole = self.cycle(push) if push in known or push == believed.content.cycle else UNDEFINED
            chunks = (whole,) * len(true.chunks)
        else:
            whole = UNDEFINED
            chunks = tuple(self.cycle(each) if each in known else UNDEFINED for each in true.chunks)
        cache = {
            whole if each == push else self.cycle(each) if each in known else UNDEFINED for each in true.cache
        }
        label = self.version(true.label)
        older = true.label < self.serving_version
        return true._replace(chunks=chunks, cache=frozenset(cache), label=UNDEFINED if older else label)

    def _content(self, content: Content) -> Content:
        cycle = self.cycle(content.cycle)
        if content.kind is ContentKind.PARTIAL and cycle == STALE:
            return Content(ContentKind.PARTIAL, cycle=STALE)  # it is begun anew, whatever was in
        return content._replace(version=self.version(content.version), cycle=cycle)

    def _kv_epoch(self, view: ServerView) -> int | None:
        epoch = view.kv_epoch
        if epoch is None or epoch == view.content.version:
            return None if epoch is None else self.version(epoch)
        return self.version(epoch) if epoch >= self.serving_version else -2

    def _session(self, session: int) -> int:
        if session in (0, FOREIGN):
            return session
        return self.cycle(session) if session == self.open_cycle else FOREIGN

    def _pending(self, pending: Pending) -> Pending:
        return Pending(self._command(pending.command), self.cycle(pending.cycle), 1, DEADLINE_S)

    def _command(self, command: Command) -> Command:
        if command.kind in (CommandKind.PUSH, CommandKind.VERIFY, CommandKind.CONTINUE):
            return command._replace(version=self.version(command.version))
        return command
