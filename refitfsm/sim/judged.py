"""Judges a simulated life, and counts how often each law could have been broken."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from refitfsm.drivers.labels import version_of
from refitfsm.fleet import Fleet
from refitfsm.model.fleet import admits, usable
from refitfsm.sim.chosen import ChosenFaults
from refitfsm.sim.faults import Kind
from refitfsm.sim.laws import belief_is_false, is_comparable, wrong_answer
from refitfsm.sim.requests import Answer
from refitfsm.sim.server import SimServer

LAWS: Final = {
    "no_answer_from_undefined_or_torn_weights": "answers with tokens",
    "no_answer_from_mixed_versions": "answers that a refit interrupted",
    "no_answer_from_a_stale_cache": "answers to a prompt that the same server answered with other weights",
    "no_answer_under_another_versions_label": "answers with a label of the fleet",
    "belief_is_true": "servers at rest, compared",
    "no_call_kills": "servers that met no fault that can make a call deadly",
    "whoever_meets_no_fault_stays_usable": "servers that met no fault since the fleet was connected",
    "a_cycle_ends_in_time": "cycles asked for",
    "laws_of_the_model": "records, judged before they were acted on",
    "a_journal_holds": "records, judged again by the auditor",
    "a_fleet_heals": "phases without faults",
}
"""Every law of a life, and what counts as having put it at risk."""
DEADLY: Final = (Kind.KILL, Kind.KILL_AFTER, Kind.DUPLICATE, Kind.SLOW, Kind.LIE)
"""Faults that kill, or that make a call deadly that was none when it was sent."""


class Judge:
    """Looks at the same servers again and again; `digests` grows while it does."""

    def __init__(
        self,
        servers: Mapping[str, SimServer],
        faults: Mapping[str, ChosenFaults],
        digests: Mapping[int, str],
    ) -> None:
        self._servers = servers
        self._faults = faults
        self._digests = digests
        self.broken: list[str] = []
        self._found = set[str]()
        self.at_risk: Counter[str] = Counter(dict.fromkeys(LAWS, 0))
        self._incarnations: dict[str, int] = {}
        self._struck_before: dict[str, int] = {}
        self._deadly_before: dict[str, int] = {}
        self._judged: Counter[str] = Counter()
        """Answers that were looked at, by server."""
        self._made_by: dict[tuple[str, int, tuple[int, ...]], str] = {}
        """The weights that answered a prompt last, by server and incarnation."""

    def found(self, law: str, how: str) -> None:
        """A law is broken. Only the first time counts: what comes after follows from it."""
        if law not in self._found:
            self._found.add(law)
            self.broken.append(f"{law}: {how}")

    def enrolled(self) -> None:
        """A fleet was made of the servers as they are now."""
        self._incarnations = {name: server.truth.incarnation for name, server in self._servers.items()}
        self._deadly_before = {name: self._struck(name, DEADLY) for name in self._servers}
        self._struck_before = {name: self._struck(name) for name in self._servers}

    def look(self, fleet: Fleet, when: str) -> None:
        """Every law over belief and truth now, and over every answer since the last look."""
        for view in fleet.status().servers:
            name = view.server
            server, incarnation = self._servers[name], self._incarnations[name]
            truth = server.truth
            self.at_risk["belief_is_true"] += is_comparable(view, truth, incarnation)
            false = belief_is_false(view, truth, self._digests, incarnation)
            if false is not None:
                self.found("belief_is_true", f"{when}: {false}")
            if self._struck(name) == self._struck_before[name]:
                self.at_risk["whoever_meets_no_fault_stays_usable"] += 1
                if not usable(view):
                    how = f"{when}: {name} met no fault, and is {view.condition.value}: {view.reason}"
                    self.found("whoever_meets_no_fault_stays_usable", how)
            if self._struck(name, DEADLY) == self._deadly_before[name]:
                self.at_risk["no_call_kills"] += 1
                if not truth.alive:
                    self.found("no_call_kills", f"{when}: {name} died, and no fault killed it: {truth.death}")
            self._look_at_answers(name, fleet.run_id, when)

    def _look_at_answers(self, name: str, run_id: str, when: str) -> None:
        answers = self._servers[name].truth.answers
        new = answers[self._judged[name] :]
        self._judged[name] = len(answers)
        for answer in new:
            self._count_risks(name, answer, run_id)
        wrong = wrong_answer(new, self._digests, run_id)
        if wrong is not None:
            law, _, how = wrong.partition(": ")
            self.found(law, f"{when}: {name}: {how}")

    def _count_risks(self, name: str, answer: Answer, run_id: str) -> None:
        if not answer.weights:
            return
        self.at_risk["no_answer_from_undefined_or_torn_weights"] += 1
        self.at_risk["no_answer_from_mixed_versions"] += answer.aborted
        self.at_risk["no_answer_under_another_versions_label"] += version_of(answer.version, run_id) >= 0
        key = (name, answer.incarnation, answer.prompt)
        made_by = answer.weights[-1].label
        self.at_risk["no_answer_from_a_stale_cache"] += self._made_by.get(key, made_by) != made_by
        self._made_by[key] = made_by

    def not_serving(self, fleet: Fleet, version: int) -> str:
        """A server that the fleet can use and that does not truly hold and serve a version; empty: none."""
        for view in filter(usable, fleet.status().servers):
            if not admits(view):
                return f"{view.server} ({view.state.value}, gate {view.gate.value})"
            if self._servers[view.server].truth.weights_digest() != self._digests[version]:
                return f"{view.server} (in truth)"
        return ""

    def _struck(self, name: str, kinds: Iterable[Kind] = Kind) -> int:
        """Faults of these kinds that befell a server so far."""
        return sum(self._faults[name].struck[kind] for kind in kinds) if name in self._faults else 0
