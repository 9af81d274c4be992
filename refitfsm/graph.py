"""The state diagram as text, made from the table's rows, so that it cannot tell another story than they do.

One edge per pair of states, labelled with the events that lead along it; a guard stands in brackets
where it decides between rows of one event. Rows that keep the state are not drawn: the good answers
among them are listed in their state.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from refitfsm.model.states import ServerState
from refitfsm.model.table import ROWS, Row, Verdict
from refitfsm.model.values import DONE, EventName

_UNSAID = frozenset({"answer_is_expected", "chunk_is_last"})
"""Guards that are left out: true of every answer, or of no matter for where the edge leads."""

_SHORT: Mapping[str, str] = {
    "command_moves_weights": "of a push or a session",
    "command_moves_memory": "of a release or a resume",
    "everything_is_resident": "all resident",
    "content_is_proved": "weights proved",
    "session_is_closed": "no session open",
    "refusal_is_of_an_open_session": "a session was left open",
    "server_is_unowned": "not paused by others",
}


_NODE = (
    'shape=box, style="rounded,filled", fillcolor="#eef3fb", color="#3b5b92",'
    ' fontname="Helvetica", fontsize=12'
)


class Edge(NamedTuple):
    """All the rows that lead from one state to another."""

    source: ServerState
    destination: ServerState
    labels: tuple[str, ...]
    """One for each event, in the table's order: `flushed [all resident, weights proved]`."""
    trouble: bool
    """Only refusals, failures, lost answers and deaths lead along it."""


def edges() -> tuple[Edge, ...]:
    """The diagram's edges: ordinary ones first."""
    moves: dict[tuple[ServerState, ServerState], list[Row]] = {}
    for row in ROWS:
        if row.verdict is Verdict.TAKE and row.destination not in (None, row.source):
            assert row.destination is not None  # noqa: S101 - for the type checker
            moves.setdefault((row.source, row.destination), []).append(row)
    good = frozenset(DONE.values())
    found = [
        Edge(source, destination, _labels(rows), not any(row.event in good for row in rows))
        for (source, destination), rows in moves.items()
    ]
    return tuple(sorted(found, key=lambda edge: edge.trouble))


def inside() -> dict[ServerState, tuple[EventName, ...]]:
    """For each state, the good answers that keep it."""
    good = frozenset(DONE.values())
    kept: dict[ServerState, list[EventName]] = {state: [] for state in ServerState}
    moving = {(edge.source, label.split(" ")[0]) for edge in edges() for label in edge.labels}
    for row in ROWS:
        stays = row.verdict is Verdict.TAKE and row.destination in (None, row.source)
        if stays and row.event in good and (row.source, row.event.value) not in moving:
            kept[row.source].append(row.event)
    return {state: tuple(dict.fromkeys(events)) for state, events in kept.items()}


def _labels(rows: list[Row]) -> tuple[str, ...]:
    guards: dict[EventName, list[str]] = {}
    for row in rows:
        said = ", ".join(_SHORT.get(name, _plain(name)) for name in row.guards if name not in _UNSAID)
        guards.setdefault(row.event, []).append(said)
    return tuple(_label(event, said) for event, said in guards.items())


def _label(event: EventName, said: list[str]) -> str:
    """An event that one of its rows takes without a guard needs none."""
    return event.value if "" in said else f"{event.value} [{'; or '.join(dict.fromkeys(said))}]"


def _plain(name: str) -> str:
    return name.replace("_", " ")


def mermaid() -> str:
    """The diagram in Mermaid's language, as GitHub shows it in a Markdown block named `mermaid`."""
    lines = ["stateDiagram-v2", "    direction LR"]
    for state, events in inside().items():
        # "<br/>" starts a line in a label; there is no other way to.
        lines.append(f"    {state.value} : {'<br/>'.join((state.value, *_wrapped(events)))}")
    lines.append(f"    [*] --> {ServerState.OFFLINE.value}")
    lines.extend(
        f"    {edge.source.value} --> {edge.destination.value} : {'<br/>'.join(edge.labels)}"
        for edge in edges()
    )
    return "\n".join(lines) + "\n"


def dot() -> str:
    """The diagram in Graphviz's language. Trouble is drawn in dashed grey."""
    lines = [
        "digraph refitfsm {",
        "    rankdir=LR; nodesep=0.5; ranksep=0.9;",
        f"    node [{_NODE}];",
        '    edge [fontname="Helvetica", fontsize=10, color="#333333"];',
        '    start [shape=point, width=0.12, label=""];',
    ]
    for state, events in inside().items():
        small = "".join(
            f'<BR/><FONT POINT-SIZE="9" COLOR="#555555">{line}</FONT>' for line in _wrapped(events)
        )
        lines.append(f"    {state.value} [label=<<B>{state.value}</B>{small}>];")
    lines.append(f"    start -> {ServerState.OFFLINE.value};")
    lines.extend(f"    {line}" for line in _dot_edges())
    return "\n".join([*lines, "}"]) + "\n"


def _dot_edges() -> Iterator[str]:
    for edge in edges():
        label = "\\n".join(edge.labels)
        # Trouble takes no part in the layout, which then follows the order of a cycle.
        style = ', style=dashed, color="#999999", fontcolor="#777777", constraint=false'
        yield (
            f"{edge.source.value} -> {edge.destination.value}"
            f' [label="{label}"{style if edge.trouble else ""}];'
        )


def _wrapped(events: tuple[EventName, ...], per_line: int = 3) -> list[str]:
    """Events as short lines: `drained, paused, flushed`."""
    names = [event.value for event in events]
    return [", ".join(names[at : at + per_line]) for at in range(0, len(names), per_line)]
