"""Plays checks on servers and says how each went."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Final, NamedTuple

from refitfsm.drivers.transport import TransportError
from refitfsm.sim.conformance.expect import Broken, NotHere
from refitfsm.sim.conformance.registry import Check
from refitfsm.sim.conformance.subject import Subject

CHECK_S: Final = 180.0
"""No check takes longer, on the subject's own clock."""

Maker = Callable[[], AbstractAsyncContextManager[Subject]]
"""Starts a server that serves the weights of seed 0; it is gone when the context ends."""


class Verdict(StrEnum):
    """How a check went."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    SKIP = "skip"


class Outcome(NamedTuple):
    """One check on one server."""

    check: Check
    verdict: Verdict
    reason: str
    """Why it failed or was skipped; empty for a pass."""
    seconds: float


async def play(check: Check, subject: Subject) -> Outcome:
    """Enrol the server and play one check on it. Never raises: whatever goes wrong is the outcome."""
    started_s = time.perf_counter()
    reason = ""
    try:
        async with asyncio.timeout(CHECK_S):
            await subject.enrol()
            reason = check.skipped_for(subject.capabilities)
            if not reason:
                await subject.idle()
                await check.run(subject)
        verdict = Verdict.SKIP if reason else Verdict.PASS
    except NotHere as error:
        verdict, reason = Verdict.SKIP, str(error)
    except Broken as error:
        verdict, reason = Verdict.FAIL, str(error)
    except Exception as error:  # noqa: BLE001 - a check may fail in any way; each way is reported
        verdict, reason = Verdict.FAIL, f"{type(error).__name__}: {error}"
    return Outcome(check, verdict, reason, time.perf_counter() - started_s)


async def play_all(make: Maker, checks: Iterable[Check]) -> AsyncIterator[Outcome]:
    """Harmless checks on one server, a new one after each failure; then each lethal one on its own."""
    rest = sorted(checks, key=lambda check: check.lethal)
    while rest:
        async with make() as subject:
            while rest:
                check = rest.pop(0)
                outcome = await play(check, subject)
                yield outcome
                if outcome.verdict is Verdict.FAIL or (check.lethal and outcome.verdict is Verdict.PASS):
                    break  # dead, or nobody knows what it was left with


async def play_shared(subject: Subject, checks: Iterable[Check]) -> AsyncIterator[Outcome]:
    """Play checks on a server that cannot be started again: lethal ones are skipped."""
    for check in checks:
        if check.lethal:
            yield Outcome(check, Verdict.SKIP, "needs a server of its own", 0.0)
            continue
        outcome = await play(check, subject)
        if outcome.verdict is Verdict.FAIL:
            await mend(subject)
        yield outcome


async def mend(subject: Subject) -> None:
    """What a check that failed may have left: a pause, requests, slow steps, an open session."""
    for path, body in (
        ("/continue_generation", {}),
        ("/abort_request", {"abort_all": True}),
        ("/slow_down", {"forward_sleep_time": None}),
        ("/end_weight_update", {}),
    ):
        try:
            await subject.post(path, body)
        except (TransportError, TimeoutError):
            return
