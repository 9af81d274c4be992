"""A fleet over simulated servers on the virtual clock: the real controller, driver and journal."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from refitfsm import Fleet, policies
from refitfsm.audit.journal import MemoryJournal, header
from refitfsm.audit.verify import Verified, verify
from refitfsm.drivers.push import inline
from refitfsm.model.states import ServerState
from refitfsm.model.values import ServerView
from refitfsm.replay import replay
from refitfsm.sim.choices import CalmChooser, Chooser
from refitfsm.sim.config import FAST, SimConfig
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.faults import FaultSource
from refitfsm.sim.laws import belief_is_false, wrong_answer
from refitfsm.sim.server import SimServer
from refitfsm.sim.tiny import TinyWeights
from refitfsm.sim.transport import SimTransport
from refitfsm.weights.offer import Offer, Target
from refitfsm.weights.plan import ChunkPlan

RUN = "test"


class TinySource(TinyWeights):
    """The tiny model's weights of one seed; counts what is read."""

    reads = 0
    """How often any of them was read."""

    def offer(self, chunk: ChunkPlan, target: Target) -> Offer:
        TinySource.reads += 1
        return super().offer(chunk, target)


class Fault(NamedTuple):
    """Something that was done to a server from outside."""

    server: str
    what: str


class World:
    """Servers with their truth, and a fleet with its beliefs. Make it inside a running virtual loop.

    The weights of version `v` are the tiny model of seed `v`.
    """

    def __init__(
        self,
        count: int = 2,
        policy: str = "colocated",
        *,
        version: str = "0.5.23",
        chooser: Chooser | None = None,
        faults: Mapping[str, FaultSource] | None = None,
        config: SimConfig | None = None,
        gpus: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        named = policies.load(policy)
        base = config or SimConfig(
            sglang_version=version, memory_saver=bool(named.policy.release), timings=FAST, skip_warmup=True
        )
        names = [f"s{index}" for index in range(count)]
        self.servers = {name: SimServer(base, name=name, chooser=chooser or CalmChooser()) for name in names}
        self.killed: list[str] = []
        """Servers that were killed on purpose."""
        self.journal = MemoryJournal(header(RUN, named.rules, names, "2026-01-01T00:00:00+00:00"))
        self.fleet = Fleet(
            {name: SimTransport(server, (faults or {}).get(name)) for name, server in self.servers.items()},
            named,
            run_id=RUN,
            journal=self.journal,
            gpus=gpus,
            aside=inline,
        )
        self.digests = {0: digest_of(tiny_model(0))}

    async def refit(self, version: int) -> None:
        self.digests[version] = digest_of(tiny_model(version))
        await self.fleet.refit(TinySource(version), version)

    async def stage(self, version: int) -> None:
        self.digests[version] = digest_of(tiny_model(version))
        await self.fleet.stage(TinySource(version), version)

    def kill(self, name: str) -> None:
        self.killed.append(name)
        self.servers[name].kill("killed by the test")

    def views(self) -> Iterator[tuple[ServerView, SimServer]]:
        for view in self.fleet.status().servers:
            yield view, self.servers[view.server]

    def check(self) -> None:
        """Every law, over belief and truth both, and over every answer so far."""
        for view, server in self.views():
            false = belief_is_false(view, server.truth, self.digests)
            assert false is None, false
            wrong = wrong_answer(server.truth.answers, self.digests, RUN)
            assert wrong is None, wrong
            dead = not server.truth.alive and view.server not in self.killed
            assert not dead, f"{view.server} died of a call that reached it: {server.truth.death}"

    def check_journal(self) -> Verified:
        """The journal holds, by the auditor, and every decision in it is made again."""
        assert replay(self.journal.lines).difference is None
        return verify(self.journal.lines)

    def serving(self) -> list[str]:
        return [view.server for view, _ in self.views() if view.state is ServerState.SERVING]

    def serving_truly(self) -> list[str]:
        """Servers that would answer a request now, whatever is believed of them."""
        return [
            name
            for name, server in self.servers.items()
            if server.truth.alive and not server.truth.gate_closed and not server.truth.memory.released
        ]
