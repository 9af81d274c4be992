"""Other planners than the shipped one: what it goes by with one thing changed, or what it hears and says."""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce

from refitfsm.model.effects import Effect
from refitfsm.model.fleet import FleetView, Goal
from refitfsm.model.guards import Guard
from refitfsm.model.row import Row
from refitfsm.model.rules import Rules
from refitfsm.model.table import Cell, Key
from refitfsm.planner.cycle import Decide, Decision, Input, ServerEvent, decide
from refitfsm.planner.playbook import Playbook
from refitfsm.planner.program import Step

Change = Callable[[Playbook], Playbook]
Wrap = Callable[[Decide], Decide]
LOOK_UPS_MAX = 3_000
"""Of the table in one decision, about small fleets."""


class Endless(Exception):
    """A decision comes to no end."""


class _Metered(Mapping[Key, Cell]):
    """Cells that can be asked for only so often in one decision."""

    def __init__(self, cells: Mapping[Key, Cell]) -> None:
        self._cells = cells
        self.left = LOOK_UPS_MAX

    def __getitem__(self, key: Key) -> Cell:
        self.left -= 1
        if self.left < 0:
            raise Endless(f"{LOOK_UPS_MAX} steps, and no end")
        return self._cells[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def planner(plays: Playbook) -> Decide:
    """The shipped planner, going by other rules. A decision that comes to no end raises `Endless`."""
    cells = _Metered(plays.book.cells)
    metered = plays._replace(book=plays.book._replace(cells=cells))

    def decides(fleet: FleetView, given: Input, now_s: float, rules: Rules) -> Decision:
        cells.left = LOOK_UPS_MAX
        return decide(fleet, given, now_s, rules, metered)

    return decides


# -- what it goes by ---------------------------------------------------------------------------------


def nothing(plays: Playbook) -> Playbook:
    """No change."""
    return plays


def in_turn(*changes: Change) -> Change:
    """One change after another."""
    return lambda plays: reduce(lambda before, change: change(before), changes, plays)


def believing(*guards: str) -> Change:
    """These guards always hold."""

    def change(plays: Playbook) -> Playbook:
        found = {name: Guard(name, _always, plays.book.guards[name].remedy) for name in guards}
        return plays._replace(book=plays.book._replace(guards={**plays.book.guards, **found}))

    return change


def _always(_view: object, _event: object, _facts: object) -> bool:
    return True


def with_guard(name: str, guard: Guard) -> Change:
    """Another guard under this name."""
    return lambda plays: plays._replace(book=plays.book._replace(guards={**plays.book.guards, name: guard}))


def with_effect(name: str, effect: Effect) -> Change:
    """Another effect under this name."""
    return lambda plays: plays._replace(
        book=plays.book._replace(effects={**plays.book.effects, name: effect})
    )


def without_rows(wrong: Callable[[Row], bool]) -> Change:
    """The table without some of its rows.

    Raises:
        ValueError: there is no such row.
    """

    def change(plays: Playbook) -> Playbook:
        cells = {key: tuple(row for row in cell if not wrong(row)) for key, cell in plays.book.cells.items()}
        if cells == plays.book.cells:
            raise ValueError("no row of the table is left out")
        return plays._replace(book=plays.book._replace(cells=cells))

    return change


def leaving_out(*names: str, goals: tuple[Goal, ...] = tuple(Goal)) -> Change:
    """The steps of these names are not done on the way to these goals.

    Raises:
        ValueError: there is no such step.
    """

    def change(plays: Playbook) -> Playbook:
        programs = {
            goal: tuple(step for step in steps if goal not in goals or step.name not in names)
            for goal, steps in plays.programs.items()
        }
        if programs == plays.programs:
            raise ValueError(f"no step of {', '.join(names)} is left out")
        return plays._replace(programs=programs)

    return change


def with_step(name: str, alter: Callable[[Step], Step]) -> Change:
    """Another step under this name, wherever there is one."""

    def altered(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(alter(step) if step.name == name else step for step in steps)

    return lambda plays: plays._replace(
        programs={goal: altered(steps) for goal, steps in plays.programs.items()},
        opening=altered(plays.opening),
        going_back={goal: altered(steps) for goal, steps in plays.going_back.items()},
    )


def with_program(goal: Goal, steps: tuple[Step, ...]) -> Change:
    """Other steps on the way to a goal."""
    return lambda plays: plays._replace(programs={**plays.programs, goal: steps})


# -- what it hears and says ----------------------------------------------------------------------------


def unwrapped(decides: Decide) -> Decide:
    """No change."""
    return decides


def hearing(translate: Callable[[FleetView, ServerEvent], ServerEvent]) -> Wrap:
    """It takes an event of a server for another."""

    def wrap(decides: Decide) -> Decide:
        def other(fleet: FleetView, given: Input, now_s: float, rules: Rules) -> Decision:
            heard = translate(fleet, given) if isinstance(given, ServerEvent) else given
            return decides(fleet, heard, now_s, rules)

        return other

    return wrap


def saying(alter: Callable[[FleetView, Decision], Decision]) -> Wrap:
    """It makes something else of what it has decided. Given are the fleet before and the decision."""

    def wrap(decides: Decide) -> Decide:
        def other(fleet: FleetView, given: Input, now_s: float, rules: Rules) -> Decision:
            return alter(fleet, decides(fleet, given, now_s, rules))

        return other

    return wrap
