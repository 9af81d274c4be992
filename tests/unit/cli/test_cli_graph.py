"""The state diagram: complete, legible, and drawn from the table alone."""

import re
from pathlib import Path

import pytest

from refitfsm import graph
from refitfsm.cli.main import main
from refitfsm.model.states import ServerState
from refitfsm.model.table import ROWS, Verdict


def moves() -> set[tuple[str, str, str]]:
    """Every (source, destination, event) of the table that changes the state."""
    return {
        (row.source.value, row.destination.value, row.event.value)
        for row in ROWS
        if row.verdict is Verdict.TAKE and row.destination not in (None, row.source) and row.destination
    }


def test_every_move_of_the_table_is_drawn_and_no_other() -> None:
    """The diagram has exactly the moves of the table, whatever the table becomes."""
    drawn = {
        (edge.source.value, edge.destination.value, label.split(" ")[0])
        for edge in graph.edges()
        for label in edge.labels
    }
    assert drawn == moves()


def test_there_is_one_edge_for_a_pair_of_states() -> None:
    """Two arrows between the same states would hide each other."""
    pairs = [(edge.source, edge.destination) for edge in graph.edges()]
    assert len(pairs) == len(set(pairs))
    assert all(source is not destination for source, destination in pairs)


@pytest.mark.parametrize("form", ["mermaid", "dot"])
def test_the_text_has_every_state_and_every_edge(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both languages draw the same states and edges."""
    assert main(["graph", "--format", form]) == 0
    text = capsys.readouterr().out
    arrow = "-->" if form == "mermaid" else "->"
    found = set(re.findall(rf"^ *(\w+) {arrow} (\w+)", text, re.MULTILINE))
    found -= {("start", "offline")}
    assert found == {(source, destination) for source, destination, _ in moves()}
    assert all(state.value in text for state in ServerState)


def test_trouble_is_told_from_the_ordinary_course() -> None:
    """A death is trouble and a commit is not."""
    trouble = {(edge.source, edge.destination): edge.trouble for edge in graph.edges()}
    assert trouble[ServerState.SERVING, ServerState.OFFLINE]
    assert not trouble[ServerState.KV_REBUILT, ServerState.SERVING]


def test_a_guard_is_told_where_it_decides() -> None:
    """The label of the way to `kv_rebuilt` says what it asks for."""
    (edge,) = [edge for edge in graph.edges() if edge.destination is ServerState.KV_REBUILT]
    assert edge.labels == ("flushed [all resident, weights proved, no session open]",)


def test_a_file_is_written_instead_of_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With -o nothing is printed and the file holds the diagram."""
    target = tmp_path / "states.mmd"
    assert main(["graph", "-o", str(target)]) == 0
    assert target.read_text() == graph.mermaid()
    assert capsys.readouterr().out == ""


def test_a_folder_that_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that cannot be written ends in one line with a remedy, and exit 2."""
    assert main(["graph", "-o", str(tmp_path / "none" / "x")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "No such file" in err


def test_without_graphviz_svg_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing `dot` is one line that says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["graph", "--format", "svg"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "graphviz" in captured.err


def test_svg_is_what_dot_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """svg is the output of the `dot` on PATH, given our text."""
    fake = tmp_path / "dot"
    fake.write_text('#!/bin/sh\n[ "$1" = -Tsvg ] || exit 3\necho "<svg/>"\ncat >/dev/null\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["graph", "--format", "svg"]) == 0
    assert capsys.readouterr().out == "<svg/>\n"


def test_a_dot_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Graphviz says of its failure is passed on, without a traceback."""
    fake = tmp_path / "dot"
    fake.write_text("#!/bin/sh\ncat >/dev/null\necho 'no fonts' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["graph", "--format", "svg"]) == 2
    err = capsys.readouterr().err
    assert "no fonts" in err
    assert err.count("\n") == 1
