"""The transport to real servers: aiohttp.

Control calls share a connection only while they follow one another: SGLang's server closes idle ones after
five seconds (`SGLANG_TIMEOUT_KEEP_ALIVE`), and a call that meets a closing connection ends without an answer,
which for a release would mean a restart.
"""

import errno
import io

import aiohttp

from refitfsm.drivers.transport import AnswerLost, NotSent, Reply, Unreachable

KEEPALIVE_S = 3.0
"""Less than the five seconds after which SGLang closes idle connections."""
CONTROL_KEEPALIVE_S = 0.2
"""Far less than any such time: within a cycle, calls follow one another at once."""
CONNECT_S = 5.0

_NORMAL = ("/generate", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/")
"""Paths that SGLang protects with the api_key; all others take the admin_api_key where there is one."""


class HttpTransport:
    """One server over HTTP.

    Args:
        url: its base, as `http://127.0.0.1:30000`.
        api_key: for ordinary paths, and for all where there is no admin key.
        admin_api_key: for control paths.

    Keys are sent in headers only; they are in no message, record or repr.
    """

    def __init__(self, url: str, *, api_key: str | None = None, admin_api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._closed = False

    def _session(self, *, generates: bool) -> aiohttp.ClientSession:
        session = self._sessions.get(generates)
        if session is None:
            idle_s = KEEPALIVE_S if generates else CONTROL_KEEPALIVE_S
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_s)
            # No total: every wait is bounded by the planner's deadline for its command.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout)
            self._sessions[generates] = session
        return session

    def _headers(self, path: str) -> dict[str, str]:
        normal = path.startswith(_NORMAL)
        key = self._api_key if normal else self._admin_api_key or self._api_key
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return headers

    async def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        if self._closed:
            raise Unreachable("the connection was closed by its owner")
        session = self._session(generates=path == "/generate")
        data = io.BytesIO(body) if body is not None else None
        try:
            async with session.request(
                method, self._url + path, data=data, headers=self._headers(path), allow_redirects=False
            ) as response:
                return Reply(response.status, await response.read())
        except aiohttp.ClientConnectorError as error:
            refused = error.os_error.errno == errno.ECONNREFUSED
            raise (NotSent if refused else Unreachable)(_reason(error)) from error
        except (aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL, UnicodeError) as error:
            raise Unreachable(_reason(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerLost(_reason(error)) from error

    async def aclose(self) -> None:
        self._closed = True
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
