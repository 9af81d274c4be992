"""Whether a fleet comes to serve once nothing goes wrong any more, a server at a time.

From whatever servers can be, calm steps are taken: answers that no fault befalls, and refits whenever no
cycle is open. In a fleet that goes on for ever and never serves some server moves for ever, and some server
is blamed for ever, since nothing fails by itself. What one server can be is finite, so it goes round in a
loop of its own steps; where no server has such a loop, every fleet comes to an end. It ends where a refit
brought all that can be used to serve, or is refused.
"""

from collections.abc import Iterator
from typing import NamedTuple

from refitfsm.check.components import components
from refitfsm.check.joint import BrokenLaw, Flags, Outcome
from refitfsm.check.modular import Modular
from refitfsm.check.questions import CALM, questions
from refitfsm.check.search import ENDS, HEALS
from refitfsm.check.situations import ANY, Arrow, Place, Server, Situation
from refitfsm.model.fleet import Goal, Phase, admits, usable
from refitfsm.model.records import Turn

_FAILING = frozenset({Turn.DROPPED.value, Turn.ABORTING.value})


class Node(NamedTuple):
    """One server beside what its fleet knows as one."""

    here: Situation
    flags: Flags
    server: Server


class Step(NamedTuple):
    """A calm step, as it is to one server."""

    to: Node
    blamed: bool
    """It is this server that the fleet does not serve for, or nobody."""


def nodes(search: Modular) -> Iterator[Node]:
    """All that servers can be."""
    for here in search.situations.values():
        for flags, servers in here.servers.items() if here.is_manned else ():
            for server in servers:
                yield Node(here, flags, server)


def calm_steps(search: Modular, node: Node) -> Iterator[Step]:
    """What can come next without a fault, and what it is to this server."""
    here, flags, server = node
    view = search.views[server[0]]
    for answer in search.answers_of(server) if view.pending is not None else ():
        if not answer.is_fault:
            there, after, moved, turned = search.after(here, flags, server, answer)
            to = Node(there, after, moved)
            yield Step(to, _is_blamed(search, node, to, turned.again.outcome if turned else None, alone=True))
    for arrow in here.arrows.get(Place("", flags, ANY), {}).values():
        if arrow.calm:
            yield _taken(search, node, arrow, alone=False)
    for question in questions(here.centre, search.planner.world, faults=False):
        if question.name in CALM and (view.pending is None or here.centre.cycle is None):
            place = Place(question.name, flags, search.class_of(here, flags, server[0], question))
            for arrow in here.arrows.get(place, {}).values():
                yield _taken(search, node, arrow, alone=True)


def _taken(search: Modular, node: Node, arrow: Arrow, *, alone: bool) -> Step:
    to = Node(arrow.target, arrow.flags, search.taken(node.here, arrow, node.server))
    return Step(to, _is_blamed(search, node, to, arrow.again.outcome, alone=alone))


def _is_blamed(search: Modular, node: Node, to: Node, outcome: Outcome | None, *, alone: bool) -> bool:
    """Whether a server drops out, or a refit that was committed ends and leaves it aside.

    Args:
        alone: no other server is why it happens.
    """
    if outcome is None:
        return False
    turns = {turn for turn, *_ in outcome.turns}
    if (to.flags.failed and not node.flags.failed) or (alone and turns & _FAILING):
        return True
    cycle, view = node.here.centre.cycle, search.views[to.server[0]]
    committed = Turn.COMMITTED in turns or (cycle is not None and cycle.phase is Phase.COMMITTED)
    refits = cycle is None or cycle.goal is Goal.REFIT
    return committed and refits and Turn.CLOSED in turns and usable(view) and not admits(view)


def judge(search: Modular) -> int:
    """Judge all that a search has found. Returns the number of calm steps.

    Raises:
        BrokenLaw: a cycle, or refits one after another, may go on for ever.
    """
    every = list(nodes(search))
    numbers = {node: number for number, node in enumerate(every)}
    inside: list[list[int]] = [[] for _ in every]
    """Steps that leave the cycle open."""
    steps: list[list[int]] = [[] for _ in every]
    blamed: list[tuple[int, int]] = []
    for number, node in enumerate(every):
        for step in calm_steps(search, node):
            to = numbers[step.to]
            steps[number].append(to)
            if node.here.centre.cycle is not None and step.to.here.centre.cycle is not None:
                inside[number].append(to)
            if step.blamed:
                blamed.append((number, to))
    at_rest = sum(node.here.centre.cycle is None for node in every)
    search.planner.seen.risks.update({HEALS: at_rest, ENDS: len(every) - at_rest})
    rounds = components(inside)
    for number, ahead in enumerate(inside):
        if any(rounds[to] == rounds[number] for to in ahead):
            raise BrokenLaw(f"{ENDS}: {_said(search, every[number])} goes round in one")
    rounds = components(steps)
    for number, to in blamed:
        if rounds[to] == rounds[number]:
            said = _said(search, every[number])
            raise BrokenLaw(f"{HEALS}: {said} is left aside at each refit, and no fault befalls it")
    return sum(map(len, steps))


def _said(search: Modular, node: Node) -> str:
    view = search.views[node.server[0]]
    return f"a server that is {view.state}, {view.condition} and {'paused' if view.paused else 'not paused'}"
