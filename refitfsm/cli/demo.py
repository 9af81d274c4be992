"""`refitfsm demo`: the whole job on simulated servers, with no GPU."""

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from refitfsm import policies
from refitfsm.audit.verify import verify_file
from refitfsm.cli.demo_play import Played, Settings, play
from refitfsm.cli.show import EXIT_INTERRUPTED, EXIT_NO, Json, Screen, error_line, report_json, servers_json
from refitfsm.errors import AuditError
from refitfsm.model.fleet import admits

HELP = (
    "Refit simulated SGLang servers over HTTP: no GPU, no server, a few seconds.\n\n"
    "In every cycle the servers answer requests, give their GPU memory to a trainer, take it back with new"
    " weights, and are asked one question: all must answer alike, and otherwise than before. At the end the"
    " audit is judged. Exits 0 if every cycle committed and the audit holds, else 1."
)
EXAMPLES = """Examples:

refitfsm demo

refitfsm demo --servers 8 --cycles 3 --policy always_on

refitfsm demo --audit demo.jsonl && refitfsm audit verify demo.jsonl
"""


def demo(
    *,
    servers: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Simulated servers.")] = 4,
    cycles: Annotated[int, typer.Option(min=1, metavar="K", help="Refit cycles.")] = 5,
    policy: Annotated[
        str, typer.Option(metavar="P", help="A shipped policy's name, or a path.")
    ] = "colocated",
    audit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the audit there; the file must not exist.")
    ] = None,
    sglang_version: Annotated[
        str, typer.Option(metavar="V", help="What is simulated: 0.5.10 to 0.5.23.")
    ] = "0.5.23",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play it on simulated servers."""
    screen = Screen(as_json=as_json)
    named = policies.load(policy)
    with tempfile.TemporaryDirectory(prefix="refitfsm-demo-") as name:
        folder = Path(name)
        kept = audit if audit is not None else folder / "audit.jsonl"
        settings = Settings(servers, cycles, named, policy, sglang_version, kept, folder)
        try:
            played = asyncio.run(play(settings, screen))
        except KeyboardInterrupt:
            error_line("interrupted: the simulated servers are gone, nothing is left behind")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        try:
            played.audit = verify_file(kept)
        except AuditError as error:
            played.aborts.append(f"audit: {error}")
    _summary(screen, settings, played, audit)
    screen.result(_as_json(settings, played, audit))
    for said in played.errors:
        error_line(said)
    if played.errors:
        raise typer.Exit(EXIT_NO)


def _summary(screen: Screen, settings: Settings, played: Played, audit: Path | None) -> None:
    status = played.status
    serving = sum(map(admits, status.servers)) if status else 0
    _mark(
        screen,
        len(played.lines) == settings.cycles,
        f"{len(played.lines)} of {settings.cycles} cycles committed;"
        f" {serving} of {settings.servers} servers serve version {status.serving_version if status else 0}",
    )
    cut = f", {played.cut} cut short by a pause" if played.cut else ""
    _mark(
        screen,
        not played.wrong,
        f"{played.answered} answers{cut}: each by one version's weights, none from a stale cache",
    )
    if played.audit is not None:
        kept = f"; kept in {audit}" if audit is not None else ""
        found = played.audit
        judged = f"{found.records} records of {found.cycles} cycles judged again"
        _mark(screen, True, f"audit holds: {judged}{kept}")


def _mark(screen: Screen, good: bool, text: str) -> None:
    sign = "✓" if good else "✗"
    if not screen.is_live:
        sign = "ok:" if good else "failed:"
    screen.line(f"{sign} {text}", "green" if good else "red")


def _as_json(settings: Settings, played: Played, audit: Path | None) -> dict[str, Json]:
    return {
        "ok": not played.errors,
        "servers": servers_json(played.status) if played.status else [],
        "policy": settings.policy.name,
        "sglang_version": settings.sglang_version,
        "cycles": [
            {
                "cycle": line.cycle,
                "version": line.version,
                "seconds": round(line.seconds, 6),
                "cycles": [{"goal": report.goal.value, **report_json(report)} for report in line.reports],
                "tokens": list(line.tokens),
            }
            for line in played.lines
        ],
        "serving_version": played.status.serving_version if played.status else 0,
        "answers": played.answered,
        "cut_short": played.cut,
        "audit": dict(played.audit._asdict()) if played.audit else None,
        "audit_file": str(audit) if audit else None,
        "errors": list(played.errors),
    }
