"""`refitfsm audit verify`: judge the log of a run again."""

from pathlib import Path
from typing import Annotated

import typer

from refitfsm.audit.verify import Verified, verify_file
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Screen, error_line
from refitfsm.errors import AuditError

HELP = (
    "Judge every record of an audit again, with code that shares nothing with the planner.\n\n"
    "Exits 0 if the whole log holds: the chain of hashes, every guard, row and effect, every law, every"
    " commit. Exits 1 at the first line that does not."
)
EXAMPLES = """Examples:

refitfsm demo --audit run.jsonl

refitfsm audit verify run.jsonl

refitfsm audit verify run.jsonl --closed --hash 0f5c... --json
"""


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The audit of a run.", show_default=False)],
    closed: Annotated[
        bool, typer.Option("--closed", help="Refuse an audit without an end: lines may be missing there.")
    ] = False,
    last_hash: Annotated[
        str,
        typer.Option(
            "--hash", metavar="HASH", help="What the last line's hash was when it was written down."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge one file."""
    screen = Screen(as_json=as_json)
    try:
        found = verify_file(file, closed=closed, last_hash=last_hash)
    except AuditError as error:
        screen.result({"holds": False, "file": str(file), "error": str(error)})
        error_line(f"audit: {error}")
        raise typer.Exit(EXIT_NO) from None
    screen.line(f"{file}: holds: {verdict(found)}")
    screen.result({"holds": True, "file": str(file), **found._asdict()})
    raise typer.Exit(EXIT_OK)


def verdict(found: Verified) -> str:
    """What a log that holds has in it, in one line."""
    ends = f"; ends inside cycle {found.open_cycle}" if found.open_cycle else ""
    ends += "" if found.ended else "; was not closed"
    return (
        f"{found.records} records of {_count(found.servers, 'server')} over {found.last_at_s:.1f} s;"
        f" {_count(found.cycles, 'cycle')} ({_count(found.committed, 'commit')}, {found.aborted} aborted);"
        f" serves version {found.serving_version}{ends}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
