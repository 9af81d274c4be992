"""Where a scenario is played: servers with their truth, fleets with their beliefs, and what was seen."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from refitfsm import policies
from refitfsm.audit.journal import MemoryJournal, header
from refitfsm.audit.verify import verify
from refitfsm.controller import Controller
from refitfsm.drivers.push import inline
from refitfsm.drivers.transport import Reply
from refitfsm.errors import AuditError
from refitfsm.fleet import Fleet
from refitfsm.model.fleet import admits
from refitfsm.model.states import Condition, Tag
from refitfsm.model.values import ServerView
from refitfsm.policies import NamedPolicy
from refitfsm.servers import ServerSpec, checked_specs
from refitfsm.sim.choices import CalmChooser
from refitfsm.sim.config import FAST, SimConfig, Timings
from refitfsm.sim.content import digest_of, tiny_model
from refitfsm.sim.faults import Fault, FaultPlan
from refitfsm.sim.laws import belief_is_false, wrong_answer
from refitfsm.sim.ledger import GpuLedger
from refitfsm.sim.requests import Answer
from refitfsm.sim.scenario import Play, Scenario, Servers, fault_of
from refitfsm.sim.scenario_sights import Sight, of_answer_law
from refitfsm.sim.scenario_steps import Connect
from refitfsm.sim.server import SimServer
from refitfsm.sim.transport import SimTransport

OWN_DEATH = "killed by the scenario"
_DEATHS_BY_FAULT = ("fault at ", "fault after ")
_STARTED = "2026-01-01T00:00:00+00:00"
_SHOWN = 100


class LedgerMeter:
    """Measures the GPUs of a ledger."""

    def __init__(self, ledger: GpuLedger) -> None:
        self._ledger = ledger

    def free_bytes(self, gpu_uuid: str) -> int | None:
        """See `drivers.room.Meter`."""
        return self._ledger.free(gpu_uuid)


class Owner:
    """A controller: its fleet, its journal, and the processes that it enrolled."""

    def __init__(self, run: str, fleet: Fleet, journal: MemoryJournal, behind: Mapping[str, str]) -> None:
        self.run = run
        self.fleet = fleet
        self.journal = journal
        self.behind = behind
        """The server behind each name."""
        self.incarnations: dict[str, int] = {}
        self.serving = 0
        self.tried = 0
        """The highest version that it was asked to push."""
        self.conditions: dict[str, Condition] = {}
        self.live = False


class Faults:
    """What befalls the calls of one server. Each fault counts calls by itself, from when it was armed."""

    def __init__(self, world: "World", server: str) -> None:
        self._world = world
        self._server = server
        self.plans: list[tuple[str, FaultPlan]] = []

    def arm(self, words: str) -> None:
        """One more fault."""
        self.plans.append((words, FaultPlan([fault_of(words)])))

    def draw(self, path: str) -> Fault | None:
        """See `sim.faults.FaultSource`."""
        drawn = [(words, plan.draw(path)) for words, plan in self.plans]
        words, fault = next((each for each in drawn if each[1] is not None), ("", None))
        if fault is not None:
            self._world.note("fault_strikes", f"{self._server} {words} {path}")
        return fault


class Watched(SimTransport):
    """The way to one server, for whoever calls it: what passes is seen."""

    def __init__(self, world: "World", server: SimServer, faults: Faults) -> None:
        super().__init__(server, faults)
        self._world = world

    async def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """As `SimTransport.request`."""
        self._world.look()
        shown = (body or b"").decode(errors="replace")
        if len(shown) > 2 * _SHOWN:
            shown = f"{shown[:_SHOWN]} ... {shown[-_SHOWN:]}"  # what is between are weights
        self._world.note("call_is_sent", f"{self.server.name} {method} {path} {shown}".rstrip())
        try:
            return await super().request(method, path, body)
        finally:
            self._world.look()


class World:
    """Make it inside a running virtual loop. The weights of version `v` are the tiny model of seed `v`."""

    def __init__(
        self, scenario: Scenario, play: Play, controls: Callable[..., Controller] = Controller
    ) -> None:
        self._controls = controls
        self.policy = policies.changed(policies.load(scenario.policy), scenario.policy_with)
        given = scenario.servers
        self.ledger = GpuLedger(given.gpu_bytes)
        self._measured = given.measured and bool(given.gpus)
        self._gpus = given.gpus
        self.seen: list[Sight] = []
        self.servers: dict[str, SimServer] = {}
        self.faults: dict[str, Faults] = {}
        self.transports: dict[str, Watched] = {}
        for number in range(given.count):
            self._start(f"s{number}", given, play)
        self.owners: dict[str, Owner] = {}
        self.digests = {0: digest_of(tiny_model(0))}
        self._answers_seen = dict.fromkeys(self.servers, 0)
        self._dead: set[tuple[str, int]] = set()

    def _start(self, name: str, given: Servers, play: Play) -> None:
        gpus = given.gpus.get(name, ())
        server = SimServer(
            _config(given, self.policy, gpus), name=name, ledger=self.ledger, chooser=CalmChooser()
        )
        server.on_death(lambda cause: self._died(name, cause))
        faults = Faults(self, name)
        for words in play.faults.get(name, ()):
            faults.arm(words)
        self.servers[name], self.faults[name] = server, faults
        self.transports[name] = Watched(self, server, faults)

    # -- owners --------------------------------------------------------------------------------------

    def owner(self, step: Connect) -> Owner:
        """A controller that is not connected yet.

        Raises:
            ConfigError: GPUs overlap, or the policy does not fit.
        """
        behind = {name: name for name in step.servers or self.servers} | step.under
        specs = [ServerSpec(f"http://{name}:30000", self._gpus.get(name, ())) for name in behind]
        checked_specs(specs, share_gpus=self.policy.policy.share_gpus)
        run = f"run{len(self.owners) + 1}"
        journal = MemoryJournal(header(run, self.policy.rules, sorted(behind), _STARTED))
        fleet = Fleet(
            {name: self.transports[server] for name, server in behind.items()},
            self.policy,
            run_id=run,
            journal=journal,
            gpus={name: self._gpus.get(server, ()) for name, server in behind.items()},
            aside=inline,
            controls=self._controls,
            meter=LedgerMeter(self.ledger) if self._measured else None,
        )
        owner = self.owners[f"{step.by}/{run}"] = Owner(run, fleet, journal, behind)
        return owner

    def enrolled(self, owner: Owner) -> None:
        """It has its servers: what answered before is none of its business."""
        owner.incarnations = {name: self.servers[at].truth.incarnation for name, at in owner.behind.items()}
        owner.live = True
        self._answers_seen = {name: len(server.truth.answers) for name, server in self.servers.items()}

    def of(self, by: str) -> Owner | None:
        """The controller of that name, the newest of them."""
        found = [owner for name, owner in self.owners.items() if name.partition("/")[0] == by]
        return found[-1] if found else None

    def _live(self) -> Iterator[Owner]:
        return (owner for owner in self.owners.values() if owner.live)

    def published(self, version: int, seed: int) -> None:
        """A version is about to be pushed."""
        if all(owner.serving < version for owner in self._live()):
            self.digests[version] = digest_of(tiny_model(seed))

    # -- what is seen --------------------------------------------------------------------------------

    def note(self, name: str, words: str) -> None:
        """Something was seen now."""
        self.seen.append(Sight(asyncio.get_running_loop().time(), name, words))

    def look(self) -> None:
        """See what can be seen at any time."""
        for name, server in self.servers.items():
            dying = server.engine.scheduler.dying
            if dying is not None and server.truth.alive:
                self._died(name, dying)
            fresh = server.truth.answers[self._answers_seen[name] :]
            self._answers_seen[name] = len(server.truth.answers)
            for answer in fresh:
                self._judge(name, answer)
        for owner in self._live():
            self._look_at_fleet(owner)

    def look_at_rest(self) -> None:
        """See also what is only to be judged between calls: whether beliefs are so."""
        self.look()
        for owner in self._live():
            for view in owner.fleet.status().servers:
                truth = self.servers[owner.behind[view.server]].truth
                false = belief_is_false(view, truth, self.digests, owner.incarnations[view.server])
                if false is not None:
                    self.note("belief_is_false", false)

    def at_the_end(self) -> None:
        """See what is left."""
        self.look_at_rest()
        for owner in self._live():
            views = owner.fleet.status().servers
            admitting = sum(map(admits, views))
            self.note("serving_at_the_end", f"{admitting} of {len(views)}")
        for name, server in self.servers.items():
            if server.truth.alive and server.truth.gate_closed:
                self.note("paused_at_the_end", name)
            if server.truth.alive and server.truth.session is not None:
                self.note("session_at_the_end", name)

    def judge_journals(self) -> None:
        """Let the auditor judge what the controllers wrote down."""
        for owner in self.owners.values():
            try:
                verify(owner.journal.lines)
            except AuditError as error:
                self.note("journal_does_not_hold", str(error))

    def _died(self, name: str, cause: str) -> None:
        """Once for each process."""
        life = (name, self.servers[name].truth.incarnation)
        if life in self._dead:
            return
        self._dead.add(life)
        self.note("server_dies", f"{name} {cause}")
        if cause != OWN_DEATH and not cause.startswith(_DEATHS_BY_FAULT):
            self.note("server_dies_of_a_call", f"{name} {cause}")

    def _judge(self, name: str, answer: Answer) -> None:
        versions = {digest: version for version, digest in self.digests.items()}
        for span in answer.weights:
            self.note("answer_is_made", f"{name} {versions.get(span.label, 'unpublished')}")
        if not self.owners:
            self._judge_by_hand(name, answer, versions)
        for run in [owner.run for owner in self.owners.values()] or [""]:
            wrong = wrong_answer([answer], self.digests, run)
            if wrong is not None:
                self.note(of_answer_law(wrong), f"{name} {_shown(answer, versions)}")
                break
        for owner in self._live():
            if name not in owner.behind.values():
                continue
            # A version moves when nobody answers yet, so what is served now or was at the last look is right.
            right = {self.digests.get(owner.serving), self.digests.get(owner.fleet.status().serving_version)}
            if any(span.label not in right for span in answer.weights):
                self.note(
                    "other_version_answers", f"{name} {answer.version}: version {owner.serving} is served"
                )

    def _judge_by_hand(self, name: str, answer: Answer, versions: Mapping[str, int]) -> None:
        """A client without refitfsm labels a version with its number."""
        made = {str(versions.get(span.label, "unpublished")) for span in answer.weights}
        if answer.version.isdigit() and made - {answer.version}:
            self.note(
                "wrong_label_answers", f"{name} says {answer.version}, and it is {', '.join(sorted(made))}"
            )

    def _look_at_fleet(self, owner: Owner) -> None:
        status = owner.fleet.status()
        if status.serving_version != owner.serving:
            owner.serving = status.serving_version
            self.note("version_is_served", f"version {owner.serving}")
        for view in status.servers:
            if owner.conditions.get(view.server, Condition.HEALTHY) is not view.condition:
                if view.condition is Condition.SUSPECT:
                    self.note("server_is_suspect", view.server)
                if view.condition is Condition.QUARANTINED:
                    self.note("server_is_quarantined", view.server)
            owner.conditions[view.server] = view.condition
            self._look_at_cache(owner, view)

    def _look_at_cache(self, owner: Owner, view: ServerView) -> None:
        """A cache that is believed empty is, as long as the server is paused."""
        truth = self.servers[owner.behind[view.server]].truth
        same = truth.alive and truth.incarnation == owner.incarnations[view.server]
        sure = view.condition is Condition.HEALTHY and view.paused and Tag.KV_CACHE in view.resident
        if same and sure and view.kv_epoch is None and len(truth.kv):
            self.note(
                "belief_is_false", f"{view.server}: cache: believed empty, truly {len(truth.kv)} entries"
            )


def _shown(answer: Answer, versions: Mapping[str, int]) -> str:
    """By which versions an answer was made, from whose cache, and what it says."""

    def names(labels: Iterable[str]) -> str:
        return ", ".join(str(versions.get(label, "unpublished")) for label in labels) or "none"

    made, read = names(span.label for span in answer.weights), names(answer.kv_read)
    return f"made by {made}, with the cache of {read}, and says {answer.version!r}"


def _config(given: Servers, policy: NamedPolicy, gpus: tuple[str, ...]) -> SimConfig:
    saver = bool(policy.policy.release) if given.memory_saver is None else given.memory_saver
    return SimConfig(
        sglang_version=given.sglang_version,
        tp_size=given.tp_size,
        memory_saver=saver,
        weights_cpu_backup=given.weights_cpu_backup,
        cuda_graph_in_saver=given.cuda_graph_in_saver,
        reads_back=given.reads_back,
        kv_cache_bytes=given.kv_cache_bytes,
        gpus=gpus,
        skip_warmup=not given.warm_up,
        launch_options=given.launch_options,
        timings=FAST if given.timings == "fast" else Timings(),
    )
