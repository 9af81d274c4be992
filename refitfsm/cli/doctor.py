"""`refitfsm doctor`: does a server fit, and for which policy. Read-only."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import typer

from refitfsm import policies
from refitfsm.cli.show import EXIT_NO, EXIT_OK, Json, Screen, key_from
from refitfsm.drivers import dialect
from refitfsm.drivers.answers import read
from refitfsm.drivers.http import HttpTransport
from refitfsm.drivers.proof import READ_BACK, unforeseen
from refitfsm.drivers.transport import Reply, TransportError
from refitfsm.errors import ConfigError
from refitfsm.model.guards import GUARDS
from refitfsm.model.values import Capabilities
from refitfsm.servers import normal_url

HELP = (
    "Say what a server is, which policies it fits, and what is missing for the others.\n\n"
    "Reads /server_info, /model_info and, where it exists, /ready. Sends nothing that could change, slow or"
    " kill the server. Exits 0 if it fits at least one policy, else 1."
)
EXAMPLES = """Examples:

refitfsm doctor --server http://127.0.0.1:30000

refitfsm doctor --server http://10.0.0.7:30000 --api-key-env SGLANG_KEY --json
"""

ASK_S = 5.0


class Findings(NamedTuple):
    """What a server's own words say."""

    url: str
    found: Capabilities | None
    """None: its version says nothing that is known."""
    misfits: tuple[str, ...]
    """Why it cannot be managed at all."""
    readiness: str
    read_back: str
    """Whether `verify = sample` can work, by the model's architecture."""
    missing: Mapping[str, str]
    """For each shipped policy, what it lacks; empty: it fits."""

    @property
    def fits(self) -> bool:
        return not self.misfits and not all(self.missing.values())


def doctor(
    server: Annotated[str, typer.Option(metavar="URL", help="The server.", show_default=False)],
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the server's api_key.")
    ] = None,
    admin_api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with its admin_api_key.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine one server."""
    screen = Screen(as_json=as_json)
    url = normal_url(server)
    findings = asyncio.run(_examine(url, key_from(api_key_env), key_from(admin_api_key_env)))
    _print(screen, findings)
    screen.result(_as_json(findings))
    raise typer.Exit(EXIT_OK if findings.fits else EXIT_NO)


async def _examine(url: str, api_key: str | None, admin_api_key: str | None) -> Findings:
    transport = HttpTransport(url, api_key=api_key, admin_api_key=admin_api_key)
    try:
        info = await _fields(transport, url, "/server_info", "/get_server_info")
        model = await _fields(transport, url, "/model_info", "/get_model_info")
        found, misfits = _judge(info, model)
        readiness = await _readiness(transport, url, found)
    finally:
        await transport.aclose()
    return Findings(url, found, misfits, readiness, _read_back(info, model), _missing(found))


async def _ask(transport: HttpTransport, url: str, path: str) -> Reply:
    """A harmless read.

    Raises:
        ConfigError: no answer.
    """
    try:
        async with asyncio.timeout(ASK_S):
            return await transport.request("GET", path)
    except TransportError as error:
        raise ConfigError(f"{url}: cannot be reached ({error}); start it, or correct the address") from None
    except TimeoutError:
        raise ConfigError(
            f"{url}: {path} gave no answer within {ASK_S:g} s; is it an SGLang server?"
        ) from None


async def _fields(transport: HttpTransport, url: str, *paths: str) -> Mapping[str, object]:
    reply = Reply(404, b"")
    for path in paths:
        reply = await _ask(transport, url, path)
        if reply.status != 404:
            break
    answer = read(reply)
    if answer.status in (401, 403):
        raise ConfigError(f"{url}: answered {answer.words}; name the variable with its key: --api-key-env")
    if answer.status != 200 or not answer.fields:
        raise ConfigError(f"{url}: {paths[0]} answered {answer.words}; is it an SGLang server?")
    return answer.fields


def _judge(
    info: Mapping[str, object], model: Mapping[str, object]
) -> tuple[Capabilities | None, tuple[str, ...]]:
    """The capabilities as far as they can be told, and everything that is wrong with the server."""
    wrong = [option for option in dialect.OPTIONS if option.wrong(info)]
    misfits = [f"{option.field} is {info.get(option.field)!r}: {option.why}" for option in wrong]
    rest = {key: value for key, value in info.items() if key not in {option.field for option in wrong}}
    try:
        return dialect.capabilities(rest, model), tuple(misfits)
    except dialect.Misfit as misfit:
        misfits.insert(0, str(misfit))
    try:
        return dialect.capabilities(rest, model, allow_unknown_version=True), tuple(misfits)
    except dialect.Misfit:
        return None, tuple(misfits)


async def _readiness(transport: HttpTransport, url: str, found: Capabilities | None) -> str:
    if found is None or dialect.parse_version(found.sglang_version) < dialect.READY_FROM:
        return "not asked: this version has no /ready, and /health would run a token"
    reply = await _ask(transport, url, "/ready")
    if reply.status == 200:
        return "ready"
    return f"not ready ({reply.status}): starting, or paused by somebody; a fleet would not take it now"


def _read_back(info: Mapping[str, object], model: Mapping[str, object]) -> str:
    """Whether the server can read tensors back, by its words: to try would kill one that is released."""
    named = model.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if not names:
        return "not known: this version does not name the model's architecture"
    if why := unforeseen(info):
        return f"no: {why}"
    return "yes" if READ_BACK.issuperset(names) else f"no: SGLang's {', '.join(names)} does not"


def _missing(found: Capabilities | None) -> dict[str, str]:
    """For each shipped policy what the server lacks."""
    return {name: _lacks(policies.load(name).policy, found) for name in policies.shipped()}


def _lacks(policy: policies.Policy, found: Capabilities | None) -> str:
    if found is None:
        return "a version that is known"
    if policy.release and not found.memory_saver:
        return GUARDS["memory_saver_is_on"].remedy
    if policy.verify.needs_checksums and not found.checksums:
        return f"checksums: they exist from SGLang {dialect.dotted(dialect.CHECKSUMS_FROM)} on"
    return ""


def _print(screen: Screen, findings: Findings) -> None:
    found = findings.found
    screen.line(findings.url, "bold")
    if found is not None:
        for name, value in (_facts(found) | {"reads back": findings.read_back}).items():
            screen.line(f"  {name:<15} {value}")
    screen.line(f"  {'readiness':<15} {findings.readiness}")
    for misfit in findings.misfits:
        screen.line(f"  cannot be managed: {misfit}", "red")
    for policy, lacks in findings.missing.items():
        if not findings.misfits:
            screen.line(
                f"  policy {policy:<12} {'fits' if not lacks else f'does not fit: {lacks}'}",
                "yellow" if lacks else "green",
            )


def _facts(found: Capabilities) -> dict[str, str]:
    saver = "on" if found.memory_saver else "off"
    backup = "come back from host memory" if found.weights_backup else "are gone: a refit must follow"
    return {
        "SGLang": found.sglang_version,
        "dialect": "weight updates in sessions" if found.sessions else "weight updates without sessions",
        "memory saver": f"{saver}; released weights {backup}" if found.memory_saver else saver,
        "checksums": "yes" if found.checksums else "no",
        "tensor parallel": str(found.tp_size),
        "model": found.model_path,
        "weights": found.weight_label or f"start-up {found.start_label}".strip(),
    }


def _as_json(findings: Findings) -> dict[str, Json]:
    found = findings.found
    return {
        "server": findings.url,
        "fits": findings.fits,
        "capabilities": None if found is None else dict(found._asdict()),
        "ready": findings.readiness == "ready" if not findings.readiness.startswith("not asked") else None,
        "readiness": findings.readiness,
        "read_back": findings.read_back,
        "misfits": list(findings.misfits),
        "policies": {
            policy: {"fits": not lacks and not findings.misfits, "missing": lacks}
            for policy, lacks in findings.missing.items()
        },
    }
