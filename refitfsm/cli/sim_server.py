"""`refitfsm sim-server`: one simulated SGLang server, for any client."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from refitfsm.cli.show import EXIT_NO, error_line, key_from
from refitfsm.cli.simulated import load_parameters, make_server
from refitfsm.errors import ConfigError
from refitfsm.sim.config import SimConfig
from refitfsm.sim.faults import FaultPlan, parse_fault
from refitfsm.sim.http import run_forever
from refitfsm.sim.server import SimServer

HELP = (
    "Run one simulated SGLang server over HTTP, to test any client against.\n\n"
    "It keeps SGLang's order and dies of the calls that the real one dies of. It prints its URL when it is"
    " up, runs until it is stopped (exit 0), and exits 1 when a call, or a fault, kills it."
)
EXAMPLES = """Examples:

refitfsm sim-server --port 30000

refitfsm sim-server --sglang-version 0.5.20 --no-memory-saver --model step-0/

refitfsm sim-server --fault kill@/update_weights_from_tensor:2 --fault delay=3@/flush_cache

A fault is KIND[=ARG]@PATH[:NTH]; kinds: refuse, lose-request, lose-answer, delay, slow, duplicate, status-before, status-after, success-false, lie, garble, corrupt, hang-before, hang-after, kill, kill-after.
"""  # noqa: E501 - an example is a line


def _within(low: int, high: int) -> Callable[[int], int]:
    """A range that takes no room in the help, where options would be cut off for it."""

    def check(value: int) -> int:
        if not low <= value <= high:
            raise typer.BadParameter(f"{value} is not between {low} and {high}")
        return value

    return check


def sim_server(
    *,
    port: Annotated[
        int, typer.Option(metavar="P", callback=_within(0, 65535), help="0 takes a free one.")
    ] = 30000,
    host: Annotated[str, typer.Option(metavar="H", help="The address to listen on.")] = "127.0.0.1",
    sglang_version: Annotated[
        str, typer.Option(metavar="V", help="What is simulated: 0.5.10 to 0.5.23.")
    ] = "0.5.23",
    tp: Annotated[int, typer.Option(metavar="N", callback=_within(1, 64), help="Tensor parallel ranks.")] = 1,
    memory_saver: Annotated[bool, typer.Option(help="Release and resume move memory.")] = True,
    weights_cpu_backup: Annotated[
        bool, typer.Option("--weights-cpu-backup", help="Weights survive a release.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of safetensors; a tiny model if not given.")
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="What goes wrong; once for each.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with its api_key.")
    ] = None,
    admin_api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with its admin_api_key.")
    ] = None,
) -> None:
    """Run one server."""
    config = SimConfig(
        sglang_version=sglang_version,
        tp_size=tp,
        memory_saver=memory_saver,
        weights_cpu_backup=weights_cpu_backup,
        api_key=key_from(api_key_env) or "",
        admin_api_key=key_from(admin_api_key_env) or "",
    )
    if model is not None:
        config = _with_model(config, model)
    plan = _fault_plan(fault or [])
    cause = asyncio.run(_until_stopped(make_server(config), host, port, plan))
    if cause is not None:
        error_line(f"simulated server: killed: {cause}")
        raise typer.Exit(EXIT_NO)


def _with_model(config: SimConfig, folder: Path) -> SimConfig:
    # Such a folder need not have a tokenizer: the server takes token ids only.
    return replace(
        config, parameters=load_parameters(folder), model_path=str(folder), skip_tokenizer_init=True
    )


def _fault_plan(specs: Sequence[str]) -> FaultPlan:
    try:
        return FaultPlan(map(parse_fault, specs))
    except ValueError as error:
        raise ConfigError(f"--fault: {error}") from None


async def _until_stopped(server: SimServer, host: str, port: int, faults: FaultPlan) -> str | None:
    """Serve; returns why the server died, or None when it was stopped.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    serving = asyncio.ensure_future(
        run_forever(server, host, port, faults=faults, on_ready=lambda url: _announce(url, server))
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    try:
        return await serving
    except asyncio.CancelledError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{host}:{port}: cannot be listened on: {error.strerror or error}; give another --host or --port"
        ) from None


def _announce(url: str, server: SimServer) -> None:
    """The URL comes first, so that a script can take the first word."""
    config = server.config
    saver = "on" if config.memory_saver else "off"
    sys.stdout.write(
        f"{url} simulates SGLang {config.sglang_version}: model {config.model_path}, tp {config.tp_size},"
        f" memory saver {saver}; stop it with Ctrl-C\n"
    )
    sys.stdout.flush()
