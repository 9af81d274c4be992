"""The pages that are made from the rules: the table and what it is made of."""

import inspect
from collections.abc import Iterable
from importlib import import_module
from itertools import groupby

from pages.markdown import Cells, anchored, code, grid, linked, listed, page
from pages.source import fields, members, summary
from refitfsm.model import effects, fleet, guards, laws, states, values
from refitfsm.model.commands import COMMANDS, LostMeans
from refitfsm.model.fleet import Goal
from refitfsm.model.states import ServerState
from refitfsm.model.table import ROWS, Row, Verdict
from refitfsm.model.values import REQUESTS, ServerView
from refitfsm.planner.program import GO_BACK, OPEN, PROGRAMS, Step
from refitfsm.planner.requests import GOAL_GUARDS


def states_page() -> str:
    """The states, and the facts beside them."""
    sections: list[str] = []
    for title, kind in (
        ("Memory tags", states.Tag),
        ("Content", states.ContentKind),
        ("Gate", states.Gate),
        ("Condition", states.Condition),
        ("Goals of a cycle", fleet.Goal),
        ("Phases of a cycle", fleet.Phase),
    ):
        sections += [f"## {title}", "", inspect.getdoc(kind) or "", "", *members(kind)]
    facts = [
        (code(name), code(given), doc or _of_type(given))
        for name, (given, _, doc) in fields(ServerView).items()
    ]
    return page(
        "States and facts",
        """A server is in one of five states. Everything else that matters is a fact of its own in the
        server's view: what the controller believes. Which step is legal where is in the
        [table](table.md); the picture is the [state diagram](state-diagram.md).""",
        ["## States", ""],
        members(ServerState),
        ["## The view of a server", ""],
        grid(("fact", "type", "meaning"), facts),
        sections,
    )


def _of_type(name: str) -> str:
    kind = getattr(states, name, None) or getattr(values, name.removesuffix(" | None"), None)
    return summary(kind) if isinstance(kind, type) else ""


def table_page() -> str:
    """Every row of the table that says more than `ignored`."""
    parts: list[str] = []
    for state in ServerState:
        parts += [f"## {state.value}", "", fields(ServerState)[state.name][2], ""]
        for title, asked in (("What may be asked", True), ("What may happen", False)):
            rows = [row for row in ROWS if row.source is state and (row.event in REQUESTS) is asked]
            shown = _rows([row for row in rows if row.verdict is not Verdict.IGNORE])
            parts += [f"### {title} in {state.value}", ""]
            parts += grid(("event", "when all of these hold", "what changes", "leads to", "why"), shown)
    return page(
        "The transition table",
        """For each state and event, the rows are asked in order, and the first whose guards all hold is
        taken. If none does, the event is refused, and the refusal names the first [guard](guards.md)
        that failed. What changes is said by [effects](effects.md). Nothing else in the package knows
        which step is legal: the planner, the second judge and this page are made from these rows.

        An answer that belongs to no command in flight is recorded and dropped, in every state.""",
        parts,
    )


def _rows(rows: Iterable[Row]) -> list[Cells]:
    """Rows as lines; neighbours that are refused for one reason share a line."""
    lines: list[Cells] = []
    for (refused, rule, remedy), group in groupby(rows, lambda row: (_refuses(row), row.rule, row.remedy)):
        if refused:
            events = "<br>".join(code(row.event) for row in group)
            lines.append((events, "", f"refused: [`{rule}`](guards.md#{rule})", "", remedy))
        else:
            lines.extend(map(_row, group))
    return lines


def _refuses(row: Row) -> bool:
    return row.verdict is Verdict.REFUSE


def _row(row: Row) -> Cells:
    to = code(row.destination) if row.destination and row.destination is not row.source else "stays"
    wanted = linked(row.guards, "guards.md") or "always"
    return code(row.event), wanted, linked(row.effects, "effects.md"), to, row.doc


def guards_page() -> str:
    """The guards, and the rules of flat refusals."""
    used = {name: _events(row for row in ROWS if name in row.guards) for name in guards.GUARDS}
    flat = dict.fromkeys((row.rule, row.remedy) for row in ROWS if row.verdict is Verdict.REFUSE)
    names = [rule for rule, _ in flat]
    return page(
        "Guards",
        """A guard is a named question about a server's view, an event and the fleet's facts. Its name is
        a true sentence when it holds. When it does not, whoever asked gets the name and the remedy.""",
        grid(
            ("guard", "when it does not hold", "asked for"),
            ((anchored(name), guard.remedy, used[name]) for name, guard in guards.GUARDS.items()),
        ),
        [
            "## Flat refusals",
            "",
            "Some events are refused in a state whatever the facts are. The rule reads like a guard.",
            "",
        ],
        grid(
            ("rule", "what to do instead", "event"),
            (
                (
                    code(rule) if rule in guards.GUARDS or rule in names[:index] else anchored(rule),
                    remedy,
                    _events(row for row in ROWS if (row.rule, row.remedy) == (rule, remedy)),
                )
                for index, (rule, remedy) in enumerate(flat)
            ),
        ),
    )


def _events(rows: Iterable[Row]) -> str:
    return listed(dict.fromkeys(row.event.value for row in rows))


def effects_page() -> str:
    """The effects."""
    return page(
        "Effects",
        """An effect is a pure function that says what a row changes in the view. A request changes no
        fact but the command in flight, and what would be unsafe to count late: a gate that is about to
        close, a server about to go on. Facts change when an answer is in.""",
        grid(
            ("effect", "what it does", "on"),
            (
                (
                    anchored(name),
                    (inspect.getdoc(effect) or "").replace("\n", " "),
                    _events(row for row in ROWS if name in row.effects),
                )
                for name, effect in effects.EFFECTS.items()
            ),
        ),
    )


def laws_page() -> str:
    """The laws."""
    return page(
        "Laws",
        """Guards keep single steps legal; laws say what the steps must add up to. They are checked after
        every step of a running fleet, on every state that a search reaches, and on every record of an
        audit. A broken law stops the controller: it issues nothing more.""",
        grid(("law", "what it says"), ((anchored(law.name), law.says) for law in laws.LAWS)),
    )


def commands_page() -> str:
    """Commands, the order of a cycle, and what may be asked of a fleet."""
    meant = {LostMeans[name]: doc for name, (_, _, doc) in fields(LostMeans).items()}
    parts = ["## Commands", ""]
    parts += grid(
        ("command", "what is sent", "it ended well when", "if its answer is lost"),
        (
            (code(kind), spec.does, spec.succeeds_when, meant[spec.lost_means])
            for kind, spec in COMMANDS.items()
        ),
    )
    parts += [
        "## The order of a cycle",
        "",
        "A server's next command is the first step of its list that is needed. What has been done is read",
        "from its view, so a cycle finds its place by itself, from whatever state it starts in.",
        "",
    ]
    for goal, steps in PROGRAMS.items():
        parts += [f"### {goal.value}", "", fields(Goal)[goal.name][2], "", *_steps(steps)]
    parts += ["### After the fleet's commit", "", *_steps(OPEN)]
    parts += [
        "### When a cycle aborts",
        "",
        "Only where the weights were not touched:",
        "",
        *_steps(GO_BACK[Goal.REFIT]),
    ]
    parts += ["", "An enrolment has changed nothing: it takes no step back."]
    parts += ["## What may be asked of a fleet", "", *_goal_guards()]
    intro = """What a driver can be asked to do to one server, in which order a cycle asks for it, and
    which cycles a fleet takes on."""
    return page("Commands and programs", intro, parts)


def _goal_guards() -> list[str]:
    found = list(dict.fromkeys(guard for wanted in GOAL_GUARDS.values() for guard in wanted))
    goals = {
        guard: [goal.value for goal, wanted in GOAL_GUARDS.items() if guard in wanted] for guard in found
    }
    head = ("what must hold", "for", "when it does not")
    return grid(head, ((code(guard.name), listed(goals[guard]), guard.remedy) for guard in found))


def _steps(steps: Iterable[Step]) -> list[str]:
    return [*(f"{number}. **{step.name}**: {step.doc}" for number, step in enumerate(steps, 1)), ""]


def diagram_block() -> str:
    """The state diagram as a Markdown block."""
    return f"```mermaid\n{import_module('refitfsm.graph').mermaid().rstrip()}\n```"


def diagram_page() -> str:
    """The state diagram."""
    intro = """How a server's state moves. An edge is labelled with the events that lead along it; a guard
    stands in brackets where it decides. `refitfsm graph` prints the same."""
    return page("State diagram", intro, [diagram_block(), "", "Every rule is in the [table](table.md)."])
