"""The demo's cycles: requests in flight, a trainer that takes its time, a refit, a look at the answers."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from refitfsm import policies
from refitfsm.audit.verify import Verified
from refitfsm.cli.ask import ask_each
from refitfsm.cli.demo_view import Line, View
from refitfsm.cli.show import Screen
from refitfsm.cli.simulated import demo_servers
from refitfsm.errors import RefitError
from refitfsm.fleet import Fleet
from refitfsm.generation import Generation
from refitfsm.reports import CycleReport, FleetStatus
from refitfsm.sim.server import SimServer
from refitfsm.sim.truth import UNDEFINED
from refitfsm.weights.files import tiny_checkpoint

PROMPT = (5, 6, 7)
REQUESTS = 3
"""For each server, in each cycle."""
HEAD_START_S = 0.08
"""What requests get before the fleet drains: some are done then and some are in flight."""
ANSWER_S = 60.0


class Settings(NamedTuple):
    """What is played."""

    servers: int
    cycles: int
    policy: policies.NamedPolicy
    policy_given: str
    sglang_version: str
    audit: Path
    folder: Path
    """For checkpoints."""


@dataclass
class Played:
    """How it went."""

    lines: list[Line] = field(default_factory=list)
    answered: int = 0
    cut: int = 0
    """Requests that a pause ended early."""
    status: FleetStatus | None = None
    audit: Verified | None = None
    aborts: list[str] = field(default_factory=list)
    """Why it ended early."""
    wrong: list[str] = field(default_factory=list)
    """Answers that must not have been given."""

    @property
    def errors(self) -> tuple[str, ...]:
        return (*self.aborts, *self.wrong)


async def play(settings: Settings, screen: Screen) -> Played:
    """All the cycles, on servers that live as long.

    Raises:
        ConfigError, AuditError: something given is wrong.
    """
    played = Played()
    start = await _train(settings, 0)
    saver = bool(settings.policy.policy.release)
    async with demo_servers(settings.servers, settings.sglang_version, start, memory_saver=saver) as servers:
        async with Fleet.connect(servers, policy=settings.policy_given, journal=settings.audit) as fleet:
            view = View(screen, _title(settings), settings.cycles)
            try:
                async with view.watching(fleet):
                    await _Play(settings, fleet, view, played).run()
            except RefitError as error:
                played.aborts.append(str(error))
            played.status = fleet.status()
        played.wrong.extend(_untrue(servers))
    return played


def _title(settings: Settings) -> str:
    return (
        f"{settings.servers} simulated SGLang {settings.sglang_version} server{'s' * (settings.servers > 1)}"
        f", policy {settings.policy.name}"
    )


async def _train(settings: Settings, version: int) -> Path:
    """What a trainer would do: new weights, in a thread, so that the fleet is not kept from its work."""
    return await asyncio.to_thread(tiny_checkpoint, settings.folder / f"v{version}", version)


class _Play:
    """The cycles of one demo, one after the other."""

    def __init__(self, settings: Settings, fleet: Fleet, view: View, played: Played) -> None:
        self._settings = settings
        self._fleet = fleet
        self._view = view
        self._played = played
        self._tokens: tuple[int, ...] = ()
        """What the last version answered."""

    async def run(self) -> None:
        self._view.now("version 0: every server is asked the same question")
        await self._ask_all(0)
        for version in range(1, self._settings.cycles + 1):
            reports = await self._cycle(version)
            self._say(version, "every server is asked the same question")
            await self._ask_all(version)
            line = Line(version, version, reports, self._tokens)
            self._played.lines.append(line)
            self._view.add(line)

    def _say(self, version: int, what: str) -> None:
        self._view.now(f"cycle {version} of {self._settings.cycles}: {what}")

    async def _cycle(self, version: int) -> tuple[CycleReport, ...]:
        keeps = not self._settings.policy.policy.release
        if keeps:
            self._say(version, f"the trainer makes version {version} on GPUs of its own")
            weights = await _train(self._settings, version)
        count = REQUESTS * self._settings.servers
        self._say(version, f"version {version - 1} answers {count} requests")
        requests = [asyncio.create_task(_request(self._fleet, number)) for number in range(count)]
        try:
            await asyncio.sleep(HEAD_START_S)
            if not keeps:
                self._say(version, "the servers give their memory to the trainer")
            reports = [await self._fleet.release()]
            if not keeps:
                self._say(version, f"the trainer has the GPUs and makes version {version}")
                weights = await _train(self._settings, version)
            self._say(version, f"version {version} goes into every server")
            reports.append(await self._fleet.refit(weights, version))
            self._count(await asyncio.gather(*requests), version - 1)
        finally:
            for request in requests:
                request.cancel()
        return tuple(report for report in reports if report.cycle)

    def _count(self, answers: list[Generation], version: int) -> None:
        for answer in answers:
            self._played.answered += 1
            self._played.cut += answer.finish_reason == "abort"
            if answer.version != version:
                self._wrong(answer, f"version {answer.version} answered instead of {version}")

    async def _ask_all(self, version: int) -> None:
        """All servers must answer alike, and otherwise than before."""
        answers = list((await ask_each(self._fleet, PROMPT)).values())
        first = answers[0]
        self._count(answers, version)
        for answer in answers:
            if answer.output_ids != first.output_ids:
                self._wrong(answer, f"answers otherwise than {first.server} at version {version}")
        if first.output_ids == self._tokens:
            self._wrong(first, f"version {version} answers as the version before")
        self._tokens = first.output_ids

    def _wrong(self, answer: Generation, why: str) -> None:
        self._played.wrong.append(f"{answer.server}: {why}")


async def _request(fleet: Fleet, number: int) -> Generation:
    """Of a length of its own, so that requests do not end together."""
    sampling = {"temperature": 0, "max_new_tokens": 12 + 11 * number % 53, "ignore_eos": True}
    return await fleet.generate((3, number + 1), sampling, wait_s=ANSWER_S, timeout_s=ANSWER_S)


def _untrue(servers: Mapping[str, SimServer]) -> list[str]:
    """What the servers themselves know to be wrong: beliefs cannot hide it."""
    errors: list[str] = []
    for url, server in servers.items():
        if server.truth.death is not None:
            errors.append(f"{url}: died: {server.truth.death}")
        for answer in server.truth.answers:
            made_by = {span.label for span in answer.weights}
            if len(made_by) > 1 or UNDEFINED in made_by or answer.kv_read:
                errors.append(f"{url}: answer {answer.rid} was made by mixed or undefined weights")
    return errors
