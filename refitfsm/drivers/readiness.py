"""Whether a server has ended its start, and is ready again after a pause."""

import asyncio

from refitfsm.drivers import dialect
from refitfsm.drivers.transport import Transport, TransportError
from refitfsm.model.values import Capabilities

PROBE_S = 5.0
"""How long a harmless read may take."""
HEALTH_AT_ONCE_S = 1.0
"""A starting server answers /health sooner than this, and one that is up no sooner."""
POLL_FIRST_S, POLL_MAX_S = 0.02, 0.5
"""Between two tries of a flush or of /ready: doubling from the first to the last."""


async def wait_until_up(transport: Transport, found: Capabilities, deadline_s: float, *, known: bool) -> bool:
    """Wait for the end of the start-up's warm-up: a release during it kills the server.

    From 0.5.20 /ready tells. Before, /health does: while the server starts it answers at once and
    runs nothing, after that it runs one token; safe on a server that has all of its memory, which is
    what enrolling one claims. Neither answers 200 on a server that somebody has paused; one that is
    `known` to have been enrolled before is past its start, and is not waited for.
    """
    has_ready = dialect.parse_version(found.sglang_version) >= dialect.READY_FROM
    path = "/ready" if has_ready else "/health"
    loop = asyncio.get_running_loop()
    wait_s = POLL_FIRST_S
    while loop.time() + wait_s < deadline_s - PROBE_S:
        asked_s = loop.time()
        async with asyncio.timeout_at(deadline_s):
            reply = await transport.request("GET", path)
        if reply.status == 200:
            return True
        if known or (not has_ready and loop.time() - asked_s > HEALTH_AT_ONCE_S):
            return False  # it is up, and stands at somebody's pause
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, POLL_MAX_S)
    return False


async def mend_readiness(transport: Transport, found: Capabilities) -> None:
    """A stranger's /health during a pause leaves /ready at 503 for ever; one good /health mends it.

    Best effort: the server has gone on whatever comes of it.
    """
    if dialect.parse_version(found.sglang_version) < dialect.READY_FROM:
        return
    try:
        async with asyncio.timeout(PROBE_S):
            if (await transport.request("GET", "/ready")).status == 503:
                await transport.request("GET", "/health")
    except (TransportError, TimeoutError):
        return
