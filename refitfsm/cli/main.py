"""The command line: `refitfsm COMMAND`. One module for each command; errors end here, in one line."""

import logging
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from refitfsm import __version__
from refitfsm.cli import (
    audit,
    check,
    corrupt,
    demo,
    doctor,
    graph,
    mutants,
    replay,
    run,
    sim_server,
    simulate,
)
from refitfsm.cli.show import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, error_line
from refitfsm.errors import RefitError

app = typer.Typer(
    name="refitfsm",
    help="Refit SGLang servers with new weights: no illegal step sent, no stale answer served, every cycle"
    " proved from its log.",
    epilog="Start with: [bold]refitfsm demo[/bold] (no GPU and no server needed)",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
audit_app = typer.Typer(
    help="Work on the audit of a run: the log written by --audit.", rich_markup_mode="rich"
)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"refitfsm {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - the callback does it
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    _help_without_command(context)


@audit_app.callback(invoke_without_command=True)
def _audit_root(context: typer.Context) -> None:
    _help_without_command(context)


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help())  # Typer prints the help itself where it draws it with rich
        raise typer.Exit(EXIT_USAGE)


for name, module, function in (
    ("demo", demo, demo.demo),
    ("run", run, run.run),
    ("doctor", doctor, doctor.doctor),
    ("sim-server", sim_server, sim_server.sim_server),
    ("graph", graph, graph.graph),
    ("check", check, check.check),
    ("mutants", mutants, mutants.run),
    ("simulate", simulate, simulate.simulate),
):
    app.command(name, help=module.HELP, epilog=module.EXAMPLES)(function)
audit_app.command("verify", help=audit.HELP, epilog=audit.EXAMPLES)(audit.verify)
audit_app.command("replay", help=replay.HELP, epilog=replay.EXAMPLES)(replay.replay)
audit_app.command("corrupt", help=corrupt.HELP, epilog=corrupt.EXAMPLES)(corrupt.run)
app.add_typer(audit_app, name="audit")

_USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""Click's base of all that is wrong with a command line. Typer brings a Click of its own from some
version on and depends on the real one before; this is the one base that both are reached from."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A user's mistake is one line on stderr, a bug a traceback."""
    # What a command has to say it prints; without a handler, warnings would come out a second time.
    logging.getLogger("refitfsm").addHandler(logging.NullHandler())
    try:
        code = app(
            list(arguments) if arguments is not None else None, prog_name="refitfsm", standalone_mode=False
        )
    except _USAGE_ERROR as error:
        error_line(_usage_message(error))
        return EXIT_USAGE
    except RefitError as error:
        error_line(str(error))
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        error_line("interrupted")
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else EXIT_OK


def _usage_message(error: Exception) -> str:
    said = cast("typer.BadParameter", error).format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "refitfsm"
    return f"{said}; see `{command} --help`"
