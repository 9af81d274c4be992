"""How servers are named: one URL each, and the GPUs they stand on as far as the caller knows."""

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from refitfsm.errors import ConfigError


class ServerSpec(NamedTuple):
    """A server to connect to."""

    url: str
    """`http://HOST:PORT`."""
    gpus: tuple[str, ...] = ()
    """GPU UUIDs by tensor parallel rank, with or without `GPU-` in front; empty: not known."""


def normal_url(url: str) -> str:
    """One spelling for one address: `http://localhost:30000/` is `http://127.0.0.1:30000`.

    Raises:
        ConfigError: it is no URL of a server.
    """
    if not isinstance(url, str):
        raise ConfigError(f"{type(url).__name__} is no URL of a server; write it as http://HOST:PORT")
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError as error:
        raise ConfigError(f"a server's URL cannot be read ({error}); write it as http://HOST:PORT") from None
    if parts.username or parts.password or parts.query or parts.path.strip("/"):
        # Not shown: what stands there may be a key.
        raise ConfigError(f"the URL of {host}: write it as http://HOST:PORT; keys are given as api_key")
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ConfigError(f"{url}: is no URL of a server; write it as http://HOST:PORT")
    host = "127.0.0.1" if host == "localhost" else host
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port or (443 if parts.scheme == 'https' else 80)}"


def normal_gpu(uuid: str) -> str:
    """One spelling for one GPU: without `GPU-` or `MIG-` in front, lower case."""
    text = uuid.strip().lower()
    return text.removeprefix("gpu-")


def checked_specs(servers: Iterable[str | ServerSpec], *, share_gpus: bool) -> tuple[ServerSpec, ...]:
    """Servers under their normal URLs.

    Raises:
        ConfigError: there is none, one is given twice, or two stand on one GPU.
    """
    if isinstance(servers, str):
        raise ConfigError(f"{servers}: give a list of servers, not one text")
    specs: dict[str, ServerSpec] = {}
    holders: dict[str, str] = {}
    for given in servers:
        spec = given if isinstance(given, ServerSpec) else ServerSpec(given)
        url = normal_url(spec.url)
        if url in specs:
            raise ConfigError(f"{url}: is given twice; give each server once")
        if len(set(map(normal_gpu, spec.gpus))) != len(spec.gpus):
            raise ConfigError(f"{url}: a GPU is named twice; name one for each tensor parallel rank")
        for gpu in map(normal_gpu, spec.gpus):
            other = holders.setdefault(gpu, url)
            if other != url and not share_gpus:
                raise ConfigError(
                    f"{url}: stands on GPU {gpu}, and so does {other}; give each its own, or set"
                    " share_gpus = true in the policy"
                )
        specs[url] = ServerSpec(url, spec.gpus)
    if not specs:
        raise ConfigError("no servers: give at least one URL")
    return tuple(specs.values())
