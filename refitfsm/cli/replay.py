"""`refitfsm audit replay`: decide a run again, from its log."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from refitfsm import policies
from refitfsm.audit.plain import Plain
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Json, Screen, error_line, write_text
from refitfsm.errors import AuditError, ConfigError
from refitfsm.replay import Difference, Fields, Replayed, replay_file
from refitfsm.sim.incident import read_incident
from refitfsm.sim.incident_scenario import Reproduced, reproduce

HELP = (
    "Decide a run again, step by step, with the planner that is installed and what its audit holds.\n\n"
    "With --as-scenario it writes a scenario instead, for `refitfsm simulate`: simulated servers meet the"
    " same trouble there, and it exits 1 if a call ends otherwise.\n\n"
    "Exits 0 if every decision is the same. Exits 1 at the first that is another one, and says what was"
    " recorded and what is decided now: look before you upgrade refitfsm, or change a policy. `verify` asks"
    " instead whether what was decided was allowed."
)
EXAMPLES = """Examples:

refitfsm audit replay run.jsonl

refitfsm audit replay run.jsonl --policy ./my-policy.toml

refitfsm audit replay run.jsonl --json

refitfsm audit replay run.jsonl --as-scenario incident.toml

refitfsm simulate --scenario incident.toml --trace
"""


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The audit of a run.", show_default=False)],
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Decide under this policy, in place of the run's. Deadlines are not compared then; a time"
            " that would have been up earlier is a difference.",
            show_default=False,
        ),
    ] = "",
    as_scenario: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a scenario that brings the same about, to this file.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decide one file again."""
    screen = Screen(as_json=as_json)
    if as_scenario is not None:
        if policy:
            raise ConfigError("audit: a scenario is under the run's own policy; leave out --policy")
        raise typer.Exit(_write_scenario(screen, file, as_scenario))
    rules = policies.load(policy).rules if policy else None
    try:
        found = replay_file(file, rules)
    except AuditError as error:
        screen.result({"same": False, "file": str(file), "error": str(error)})
        error_line(f"audit: {error}")
        raise typer.Exit(EXIT_NO) from None
    screen.result(_as_json(file, found))
    if found.difference is not None:
        error_line(f"audit: {file}: {told(found.difference)}")
        raise typer.Exit(EXIT_NO)
    screen.line(
        f"{file}: decided the same under {found.policy}: {found.records} records in {found.steps} steps"
    )
    raise typer.Exit(EXIT_OK)


def _write_scenario(screen: Screen, file: Path, to: Path) -> int:
    """Write it, and say how near it comes; the exit status."""
    try:
        lines = file.read_bytes().splitlines()
        made = reproduce(read_incident(lines, str(file)))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; give another path") from error
    except AuditError as error:
        screen.result({"same": False, "file": str(file), "error": str(error)})
        error_line(f"audit: {error}")
        return EXIT_NO
    write_text(to, made.text)
    calls = f"{made.same} of {len(made.recorded)} calls end as in the run"
    screen.line(f"{to}: {calls}{'' if made.good else ', then they differ'}")
    for claim in made.left_out:
        screen.line(f"    did not come about again, and is left out: {claim}")
    screen.result(
        {
            "same": made.good,
            "file": str(file),
            "scenario": str(to),
            "calls": len(made.recorded),
            "calls_same": made.same,
            "left_out": list(made.left_out),
            "wrong": list(made.wrong),
        }
    )
    if made.good:
        return EXIT_OK
    error_line(f"audit: {to}: {_first_difference(made)}")
    return EXIT_NO


def _first_difference(made: Reproduced) -> str:
    at = made.same
    if at == len(made.recorded) == len(made.played):
        return made.wrong[0]
    ends = [
        "none" if at >= len(calls) else f"{calls[at][0]} {calls[at][1].how} {sorted(calls[at][1].failed)}"
        for calls in (made.recorded, made.played)
    ]
    return f"call {at + 1} of the run: {ends[0]}; of the scenario: {ends[1]}"


def told(difference: Difference) -> str:
    """What is decided otherwise, in one line."""
    where = f"line {difference.line}: step {difference.step} at {difference.at_s:.3f} s is decided otherwise:"
    recorded, decided = difference.recorded, difference.decided
    changes = [f"{each.field} {_json(each.recorded)} -> {_json(each.decided)}" for each in difference.changes]
    more = f" ({', '.join(changes[:_SHOWN])}{', ...' if len(changes) > _SHOWN else ''})" if changes else ""
    return f"{where} recorded: {_record(recorded)}; now: {_record(decided)}{more}"


_SHOWN = 4


def _record(fields: Fields | None) -> str:
    """A record in a few words."""
    if fields is None:
        return "nothing"
    if "turn" in fields:
        return " ".join(filter(None, ("cycle", str(fields["turn"]), str(fields.get("reason", "")))))
    event = fields["event"]
    name = event["name"] if isinstance(event, dict) else event
    detail = event.get("detail", "") if isinstance(event, dict) else ""
    verdict = {"refuse": ", refused", "ignore": ", ignored"}.get(str(fields["verdict"]), "")
    return f"{name} of {fields['server']}{verdict}{f' ({detail})' if detail else ''}"


def _json(value: Plain) -> str:
    return msgspec.json.encode(value).decode()


def _as_json(file: Path, found: Replayed) -> dict[str, Json]:
    difference = found.difference
    data: dict[str, Json] = {
        "same": difference is None,
        "file": str(file),
        "run": found.run,
        "policy": found.policy,
        "records": found.records,
        "steps": found.steps,
    }
    if difference is not None:
        data["difference"] = {
            **difference._asdict(),
            "changes": [change._asdict() for change in difference.changes],
        }
    return data
