"""`refitfsm graph`: the state diagram."""

import shutil
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from refitfsm import graph as diagram
from refitfsm.cli.show import write_text
from refitfsm.errors import ConfigError

HELP = "Print the state diagram of a server, made from the transition table itself."
EXAMPLES = """Examples:

refitfsm graph

refitfsm graph --format svg -o states.svg

refitfsm graph --format dot | dot -Tpng -o states.png
"""

RENDER_S = 30.0


class Format(StrEnum):
    """What the diagram is written in."""

    MERMAID = "mermaid"
    DOT = "dot"
    SVG = "svg"


def graph(
    form: Annotated[Format, typer.Option("--format", help="svg needs Graphviz.")] = Format.MERMAID,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file instead of stdout.", show_default=False)
    ] = None,
) -> None:
    """Print or write the diagram."""
    text = {Format.MERMAID: diagram.mermaid, Format.DOT: diagram.dot, Format.SVG: _svg}[form]()
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text(output, text)


def _svg() -> str:
    """Drawn by Graphviz.

    Raises:
        ConfigError: it is not installed, or fails.
    """
    binary = shutil.which("dot")
    if binary is None:
        raise ConfigError(
            "graph: Graphviz's `dot` is not installed; install the package graphviz, or use --format dot"
        )
    try:
        done = subprocess.run(  # noqa: S603 - the program found on PATH, on a text of our own
            [binary, "-Tsvg"],
            input=diagram.dot(),
            capture_output=True,
            text=True,
            timeout=RENDER_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise ConfigError(f"graph: {binary} failed: {said}; use --format dot") from None
    return done.stdout
