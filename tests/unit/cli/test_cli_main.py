"""The command line as a whole: help, version, and mistakes in one line."""

import subprocess
import sys

import pytest
import typer.core
import typer.main
from conftest import Cli

import refitfsm
from refitfsm.cli.main import app, main
from refitfsm.errors import InvariantViolation

COMMANDS = (
    ("demo",),
    ("run",),
    ("check",),
    ("doctor",),
    ("sim-server",),
    ("graph",),
    ("audit", "verify"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples(cli: Cli, command: tuple[str, ...]) -> None:
    """The help of each command shows how it is called."""
    ran = cli(*command, "--help")
    assert ran.code == 0
    assert "Examples:" in ran.out
    assert f"refitfsm {' '.join(command)}" in ran.out.partition("Examples:")[2]


def test_every_option_says_what_it_is() -> None:
    """No parameter stands in the help without a word."""
    commands = {" ".join(names): _command(names) for names in COMMANDS}
    silent = [
        f"{name} {parameter.name}"
        for name, command in commands.items()
        for parameter in command.params
        if not parameter.help
    ]
    assert silent == []


def _command(names: tuple[str, ...]) -> typer.core.TyperCommand:
    command = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]
    return command


def test_the_commands_are_those_that_work() -> None:
    """No command is announced before it exists."""
    root = typer.main.get_command(app)
    assert sorted(root.commands) == [
        "audit",
        "check",
        "demo",
        "doctor",
        "graph",
        "mutants",
        "run",
        "sim-server",
        "simulate",
    ]
    assert sorted(root.commands["audit"].commands) == ["corrupt", "replay", "verify"]


def test_version(cli: Cli) -> None:
    """--version is the package's version."""
    assert cli("--version") == (0, f"refitfsm {refitfsm.__version__}\n", "")


@pytest.mark.parametrize("command", [(), ("audit",)], ids=str)
def test_without_a_command_the_help_is_shown(cli: Cli, command: tuple[str, ...]) -> None:
    """No command is a usage error that shows what there is."""
    ran = cli(*command)
    assert (ran.code, ran.err) == (2, "")
    assert "Commands" in ran.out


@pytest.mark.parametrize(
    "arguments", [("fly",), ("graph", "--format", "png"), ("audit", "burn"), ("doctor",)], ids=str
)
def test_bad_usage_is_one_line(cli: Cli, arguments: tuple[str, ...]) -> None:
    """A mistake on the command line is exit 2 and one line that says where help is."""
    ran = cli(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.error.startswith("refitfsm: ")
    assert "--help`" in ran.error


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no mistake of the user is not hidden behind one line."""

    def broken() -> str:
        raise InvariantViolation("a law is broken")

    monkeypatch.setattr("refitfsm.graph.mermaid", broken)
    with pytest.raises(InvariantViolation):
        main(["graph"])


def test_the_module_is_the_command() -> None:
    """`python -m refitfsm` is `refitfsm`, with its exit status."""
    command = [sys.executable, "-m", "refitfsm", "graph", "--format", "png"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
