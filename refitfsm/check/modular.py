"""Every interleaving of a fleet, a server at a time: what each can be, beside each centre.

Servers meet only in what their fleet knows as one (`joint`). So the search keeps, for each centre, the set
of all that a server can be beside it, and never their product. A step of one server moves that server; where
it turns the cycle it moves the centre, and with it whatever may sit beside. This takes in every interleaving,
and some that cannot be, where the pasts of two servers exclude each other: what holds here holds. What does
not may be a false alarm; `search` looks for it in full, and has the shortest way there.

States come in the order of the fewest faults that lead to them, so each is looked at once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, combinations_with_replacement, permutations, product

from refitfsm.check import laws
from refitfsm.check.codes import Codes
from refitfsm.check.joint import (
    BrokenLaw,
    Centre,
    Entangled,
    Flags,
    Outcome,
    Planner,
    Question,
    centre_of,
    facts_of,
    flags_of,
)
from refitfsm.check.moves import Outcome as Answer
from refitfsm.check.moves import is_out, outcomes, unnoticed
from refitfsm.check.questions import CALM, FAULTS, TIME_IS_UP, TURNS_OVER, answered, questions
from refitfsm.check.search import KILLS, LATE, start
from refitfsm.check.situations import ANY, Again, Arrow, Class, Place, Server, Situation, Turned
from refitfsm.check.truth import TrueServer
from refitfsm.check.uncollected import uncollected
from refitfsm.model.fleet import admits, holds_served, holds_staged, usable
from refitfsm.model.values import ServerView

_NOTHING = frozenset({"refused", "absorbed"})


class Modular:
    """The search."""

    def __init__(self, servers: int, faults: int, planner: Planner) -> None:
        self.servers, self.faults, self.planner = servers, faults, planner
        self.situations: dict[tuple[Centre, tuple[Flags, ...]], Situation] = {}
        self.steps = 0
        self._todo: list[list[tuple[Situation, Flags, Server]]] = [[] for _ in range(faults + 1)]
        self.views: list[ServerView] = []
        self.trues: list[TrueServer] = []
        self._view_numbers: dict[ServerView, int] = {}
        self._centre_numbers: dict[Centre, int] = {}
        self._true_numbers: dict[TrueServer, int] = {}
        self._answers: dict[tuple[object, ...], Outcome] = {}
        self._turned: dict[tuple[object, ...], Turned] = {}
        self._images: dict[tuple[object, ...], dict[int, tuple[int, ServerView]]] = {}
        self._classes: dict[tuple[object, ...], Class] = {}
        self._recoded: dict[tuple[object, ...], int] = {}
        self._outcomes: dict[Server, tuple[Answer, ...]] = {}
        self._judged: set[tuple[object, ...]] = set()
        self._late: set[ServerView] = set()

    # -- what there is -------------------------------------------------------------------------------

    @property
    def states(self) -> int:
        """What servers can be: in all situations together."""
        return sum(len(each) for here in self.situations.values() for each in here.servers.values())

    def run(self) -> None:
        """From a fleet that is being enrolled to the fixed point.

        Raises:
            BrokenLaw: a law does not hold.
            Entangled: servers cannot be taken apart under this planner.
        """
        world = self.planner.world
        first = start(self.servers, self.faults, world)
        centre, codes = centre_of(first.fleet, 0, world.rules.attempts)
        flags = tuple(flags_of(first.fleet.cycle, name) for name in first.fleet.servers)
        here = self.situation(centre, flags)
        for each, view, true in zip(flags, first.fleet.servers.values(), first.truth, strict=True):
            self.add(here, each, (self._view(codes.view(view)), self._true(codes.true(true, view))), 0)
        self.go_on()

    def go_on(self) -> None:
        """To the fixed point, from what was added."""
        with uncollected():
            for price, todo in enumerate(self._todo):
                while todo:
                    self._settle(*todo.pop(), price)

    def situation(self, centre: Centre, flags: Iterable[Flags]) -> Situation:
        key = (centre, tuple(sorted(flags)))
        if key not in self.situations:
            centre_number = self._centre_numbers.setdefault(centre, len(self._centre_numbers))
            self.situations[key] = Situation(len(self.situations), centre_number, *key)
        return self.situations[key]

    def add(self, here: Situation, flags: Flags, server: Server, price: int) -> None:
        """A server can be this, after so many faults of the whole fleet."""
        if price <= self.faults and server not in here.servers.get(flags, ()):
            self._todo[price].append((here, flags, server))

    def _view(self, view: ServerView) -> int:
        number = self._view_numbers.setdefault(view, len(self.views))
        if number == len(self.views):
            self.views.append(view)
        return number

    def _true(self, true: TrueServer) -> int:
        number = self._true_numbers.setdefault(true, len(self.trues))
        if number == len(self.trues):
            self.trues.append(true)
        return number

    def _recode(self, true: TrueServer, believed: ServerView, codes: Codes) -> int:
        key = (true, believed.content.cycle, is_out(believed), codes)
        if key not in self._recoded:
            self._recoded[key] = self._true(codes.true(true, believed))
        return self._recoded[key]

    # -- one server ----------------------------------------------------------------------------------

    def _settle(self, here: Situation, flags: Flags, server: Server, price: int) -> None:
        mine = here.servers.setdefault(flags, {})
        if server in mine:
            return
        mine[server] = price
        if here.is_manned:
            self._expand(here, flags, server, price)
        elif len(here.servers) == len(set(here.flags)):
            here.is_manned = True
            for others, known in list(here.servers.items()):
                for each in list(known):
                    known[each] = price
                    self._expand(here, others, each, price)

    def _expand(self, here: Situation, flags: Flags, server: Server, price: int) -> None:
        self._judge(here, server)
        view, true = self.views[server[0]], self.trues[server[1]]
        if view.pending is not None:
            for answer in self.answers_of(server):
                if price + answer.is_fault <= self.faults:
                    self._answered(here, flags, server, answer, price + answer.is_fault)
        if price < self.faults and not is_out(view):
            for what, after in unnoticed(true, self.planner.world):
                self.steps += 1
                self.planner.seen.faults[what] += 1
                self.add(here, flags, (server[0], self._true(after)), price + 1)
        self._put(here, Place("", flags, ANY), server, price)
        for question in questions(here.centre, self.planner.world, faults=self.faults > 0):
            if question is not TURNS_OVER or view.pending is None:
                self._classed(here, flags, server, price, question)

    def _judge(self, here: Situation, server: Server) -> None:
        """Every law, once."""
        if (here.centre_number, server) in self._judged:
            return
        self._judged.add((here.centre_number, server))
        centre = here.centre
        view, true = self.views[server[0]], self.trues[server[1]]
        facts, risks = facts_of(centre), self.planner.seen.risks
        why = laws.broken_by(view, true, facts, centre.truly_serving, risks)
        if not why and view not in self._late:
            self._late.add(view)
            risks[LATE] += 1
            why = laws.moved_by_a_late_answer(view, facts, self.planner.world.book)
        if why:
            raise BrokenLaw(why)

    def answers_of(self, server: Server) -> tuple[Answer, ...]:
        """What can become of its command in flight."""
        if server not in self._outcomes:
            view, true = self.views[server[0]], self.trues[server[1]]
            assert view.pending is not None  # noqa: S101 - for the type checker
            pushes = view.content.cycle == view.pending.cycle
            found = outcomes(true, view.pending, self.planner.world, pushes=pushes, faults=self.faults > 0)
            self._outcomes[server] = tuple(found)
        return self._outcomes[server]

    def _answered(self, here: Situation, flags: Flags, server: Server, answer: Answer, price: int) -> None:
        self.steps += 1
        if answer.is_fault:
            self.planner.seen.faults[answer.name.partition(": ")[2]] += 1
        else:
            self.planner.seen.risks[KILLS] += 1
        if answer.fatal:
            raise BrokenLaw(f"no_command_kills: a server died of {answer.fatal}")
        there, after, moved, turned = self.after(here, flags, server, answer)
        self.add(there, after, moved, price)
        if turned is not None:
            self._turns(here, turned, price, calm=not answer.is_fault)

    def after(
        self, here: Situation, flags: Flags, server: Server, answer: Answer
    ) -> tuple[Situation, Flags, Server, Turned | None]:
        """Where an answer leaves its server; and how it turns the cycle, if it does."""
        view = self.views[server[0]]
        key = (here.centre_number, flags, server[0], answer.event, answer.report)
        if key not in self._answers:
            question = answered(view, answer.event, answer.report, 0)
            self._answers[key] = self.planner.ask(here.centre, (flags,), (view,), question)
        alone = self._answers[key]
        if not alone.turns:
            true = self._recode(answer.true, alone.raw[0], alone.codes)
            return here, flags, (self._view(alone.view(0)), true), None
        turned = self._turned_by(here, flags, server, answer)
        seat, outcome = turned.again.seat, turned.again.outcome
        true = self._recode(answer.true, outcome.raw[seat], outcome.codes)
        return turned.there, outcome.flags[seat], (turned.view, true), turned

    # -- turns ---------------------------------------------------------------------------------------

    def _turned_by(self, here: Situation, flags: Flags, server: Server, answer: Answer) -> Turned:
        key = (here.number, flags, server[0], answer.event, answer.report)
        if key not in self._turned:
            seat = here.flags.index(flags)
            views = [self.views[number] for number in here.first_views()]
            views[seat] = self.views[server[0]]
            question = answered(views[seat], answer.event, answer.report, seat)
            outcome = self.planner.ask(here.centre, here.flags, tuple(views), question)
            again = Again(here.flags, tuple(views), seat, question, outcome)
            there = self.situation(outcome.centre, outcome.flags)
            self._turned[key] = Turned(again, there, self._view(outcome.view(seat)))
        return self._turned[key]

    def _turns(self, here: Situation, turned: Turned, price: int, *, calm: bool) -> None:
        """What happens to one server turns the cycle, for all."""
        if turned.price is not None and turned.price <= price and (turned.calm or not calm):
            return
        turned.price = price if turned.price is None else min(price, turned.price)
        turned.calm = turned.calm or calm
        again = turned.again
        for other, each in enumerate(here.flags):
            if other != again.seat:
                place = Place("", each, ANY)
                self._arrow(here, place, turned.there, again._replace(seat=other), price, 0, calm)

    def _arrow(  # noqa: PLR0917 - from where to where
        self,
        here: Situation,
        place: Place,
        there: Situation,
        again: Again,
        price: int,
        cost: int,
        calm: bool,
    ) -> None:
        outcome = again.outcome
        flags = outcome.flags[again.seat]
        turns = tuple(turn for turn, *_ in outcome.turns)
        key = (there.number, flags, outcome.codes, turns)
        arrows = here.arrows.setdefault(place, {})
        if key in arrows:
            calm = arrows[key].calm = calm or arrows[key].calm
            if arrows[key].price <= price:
                return
        images = self._images.setdefault(
            (
                here.centre_number,
                place.question,
                place.flags,
                flags,
                there.centre_number,
                outcome.codes,
                turns,
            ),
            {},
        )
        arrow = Arrow(there, flags, outcome.codes, again, price, cost, calm, images)
        arrows[key] = arrow
        for server, faults in tuple(here.places.get(place, ())):
            self._follow(here, arrow, server, faults)

    def _follow(self, here: Situation, arrow: Arrow, server: Server, faults: int) -> None:
        """A server is taken along."""
        price = max(faults + arrow.cost, arrow.price)
        if price > self.faults:
            return
        self.steps += 1
        self.add(arrow.target, arrow.flags, self.taken(here, arrow, server), price)

    def taken(self, here: Situation, arrow: Arrow, server: Server) -> Server:
        """What a turn makes of a server."""
        if server[0] not in arrow.images:
            arrow.images[server[0]] = self._image(here, arrow, server[0])
        number, raw = arrow.images[server[0]]
        return number, self._recode(self.trues[server[1]], raw, arrow.codes)

    def _image(self, here: Situation, arrow: Arrow, view: int) -> tuple[int, ServerView]:
        again, seat = arrow.again, arrow.again.seat
        views = (*again.views[:seat], self.views[view], *again.views[seat + 1 :])
        outcome = self.planner.ask(here.centre, again.flags, views, again.question)
        expected = again.outcome
        if (outcome.centre, outcome.flags) != (expected.centre, expected.flags):
            mine, theirs = self.views[view], again.views[seat]
            raise Entangled(f"{again.question.name}: {mine} turns the cycle otherwise than {theirs}")
        return self._view(outcome.view(seat)), outcome.raw[seat]

    def _put(self, here: Situation, place: Place, server: Server, price: int) -> None:
        """A server is in a place: it is taken along by every turn that is known."""
        for arrow in tuple(here.arrows.get(place, {}).values()):
            self._follow(here, arrow, server, price)
        here.places.setdefault(place, []).append((server, price))

    # -- questions to all ----------------------------------------------------------------------------

    def _classed(self, here: Situation, flags: Flags, server: Server, price: int, question: Question) -> None:
        kind = self.class_of(here, flags, server[0], question)
        self._put(here, Place(question.name, flags, kind), server, price)
        known = here.classes.setdefault((question.name, flags), {})
        if kind not in known:
            known[kind] = server[0], price
            for seated in self._seatings(here, question, (flags, kind)):
                self._asked(here, question, seated)

    def class_of(self, here: Situation, flags: Flags, number: int, question: Question) -> Class:
        """All that may differ between two servers in what the fleet makes of a question."""
        key = (here.centre_number, flags, number, question.name)
        if key not in self._classes:
            centre = here.centre
            view = self.views[number]
            alone = self.planner.ask(centre, (flags,), (view,), question)
            found: Class = (alone.turns, alone.issued, alone.flags, view.checksum)
            if centre.cycle is None:
                found += self._said_of(centre, view)
            self._classes[key] = found
        return self._classes[key]

    def _said_of(self, centre: Centre, view: ServerView) -> Class:
        """What the guards of goals read of a server."""
        facts = facts_of(centre)
        return (
            view.state,
            view.condition,
            usable(view),
            admits(view),
            holds_served(view, facts),
            holds_staged(view, centre.staged, centre.serving_version + 1),
            bool(self.planner.world.rules.release_tags & view.resident),
        )

    def _seatings(
        self, here: Situation, question: Question, new: tuple[Flags, Class]
    ) -> Iterator[tuple[tuple[Flags, Class], ...]]:
        """Every way to seat servers of the known classes, at least one of them of the new class."""
        groups = []
        for flags, count in sorted(Counter(here.flags).items()):
            known = [(flags, kind) for kind in here.classes.get((question.name, flags), ())]
            groups.append(tuple(combinations_with_replacement(known, count)))
        for found in product(*groups):
            seated = tuple(chain.from_iterable(found))
            if new not in seated:
                continue
            # When the time is up, servers fail one after another: the first one is what aborts the cycle.
            yield from set(permutations(seated)) if question is TIME_IS_UP else (seated,)

    def _asked(self, here: Situation, question: Question, seated: tuple[tuple[Flags, Class], ...]) -> None:
        first = [here.classes[question.name, flags][kind] for flags, kind in seated]
        cost = int(question.name in FAULTS)
        price = max(price for _, price in first) + cost
        if price > self.faults:
            return
        if cost:
            self.planner.seen.faults[question.name] += 1
        views = tuple(self.views[number] for number, _ in first)
        flags = tuple(each for each, _ in seated)
        outcome = self.planner.ask(here.centre, flags, views, question)
        if not outcome.turns and question is TURNS_OVER:
            raise BrokenLaw("a_cycle_ends: nobody does anything, and the cycle stays open")
        if outcome.turns and outcome.turns[0][0] in _NOTHING:
            return
        there = self.situation(outcome.centre, outcome.flags)
        for seat, (each, kind) in enumerate(seated):
            again = Again(flags, views, seat, question, outcome)
            place = Place(question.name, each, kind)
            self._arrow(here, place, there, again, price, cost, question.name in CALM)
