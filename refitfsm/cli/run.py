"""`refitfsm run`: refit running servers from checkpoint folders."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from refitfsm.cli.refits import Order, Outcome, Target, carry_out
from refitfsm.cli.show import EXIT_OK, Screen, error_line, key_from
from refitfsm.errors import ConfigError
from refitfsm.servers import ServerSpec, normal_url

HELP = (
    "Refit running servers: versions 1 to K, from the given folders in turn.\n\n"
    "Each cycle gives the policy's memory back, pushes the weights, verifies them, and serves them once every"
    " server has them. Servers must be in their ordinary serving state when this starts."
)
EXAMPLES = """Examples:

refitfsm run --server http://127.0.0.1:30000 --weights step-100/

refitfsm run --server http://127.0.0.1:30000 --server http://127.0.0.1:30001 --weights a/ --weights b/ --cycles 10 --policy always_on --audit run.jsonl

refitfsm run --server http://127.0.0.1:30000 --weights step-100/ --prompt-ids "5,6,7" --json

Exit status: 0 committed, 2 bad input and nothing was sent, 3 aborted and all servers serve the old version, 4 a server is quarantined, lost or does not serve, 130 interrupted.
"""  # noqa: E501 - an example is a line


def run(
    *,
    server: Annotated[
        list[str], typer.Option(metavar="URL", help="A server; once for each.", show_default=False)
    ],
    weights: Annotated[
        list[Path],
        typer.Option(
            metavar="DIR", help="A folder of safetensors; several are taken in turn.", show_default=False
        ),
    ],
    cycles: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="How many refits; the number of weights if not given."),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="P", help="A shipped policy's name, or a path.")
    ] = "colocated",
    audit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the audit there; the file must not exist.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the servers' api_key.")
    ] = None,
    admin_api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with their admin_api_key.")
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(metavar="URL=UUID[,UUID]", help="A server's GPUs by tensor parallel rank."),
    ] = None,
    prompt_ids: Annotated[
        str | None,
        typer.Option(metavar="IDS", help='Token ids, as "5,6,7": asked of each server after a refit.'),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Refit running servers."""
    target = Target(
        servers=_specs(server, gpus or []),
        policy=policy,
        audit=audit,
        api_key=key_from(api_key_env),
        admin_api_key=key_from(admin_api_key_env),
    )
    count = cycles if cycles is not None else len(weights)
    order = Order(tuple(weights[index % len(weights)] for index in range(count)), _token_ids(prompt_ids))
    screen = Screen(as_json=as_json)
    outcome = asyncio.run(carry_out(target, order, screen))
    _end(screen, outcome)


def _end(screen: Screen, outcome: Outcome) -> None:
    screen.result(outcome.as_json())
    if outcome.error:
        error_line(outcome.error)
    if outcome.code != EXIT_OK:
        raise typer.Exit(outcome.code)


def _specs(servers: Sequence[str], gpus: Sequence[str]) -> tuple[ServerSpec, ...]:
    """Servers with their GPUs.

    Raises:
        ConfigError: GPUs of a server that is not given, given twice, or not written as URL=UUID.
    """
    urls = [normal_url(server) for server in servers]
    placed: dict[str, tuple[str, ...]] = {}
    for text in gpus:
        url, _, uuids = text.partition("=")
        named = tuple(uuid.strip() for uuid in uuids.split(",") if uuid.strip())
        if not named:
            raise ConfigError(f"--gpus {text}: write it as URL=UUID or URL=UUID,UUID")
        url = normal_url(url)
        if url not in urls:
            raise ConfigError(f"--gpus {text}: {url} is no --server; give it as one")
        if url in placed:
            raise ConfigError(f"--gpus {text}: {url} has its GPUs already; separate several by commas")
        placed[url] = named
    return tuple(ServerSpec(url, placed.get(url, ())) for url in urls)


def _token_ids(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f'--prompt-ids "{text}": write token ids as "5,6,7"')
    return tuple(map(int, parts))
