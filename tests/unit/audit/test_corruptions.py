"""What is done to a journal is noticed, and what is not is another run's."""

import random
from collections import Counter
from itertools import islice

import pytest

from refitfsm import policies
from refitfsm.audit.corruptions import CUT, KINDS, Corruption, corruptions
from refitfsm.audit.journal import MemoryJournal, header
from refitfsm.audit.verify import verify
from refitfsm.cli.corrupt import Fate, attempts, fate
from refitfsm.model.fleet import FleetView, Goal
from refitfsm.model.values import DONE, Capabilities, Event, Report
from refitfsm.planner.cycle import Abandon, Input, ServerEvent, decide
from refitfsm.planner.inputs import noted
from refitfsm.planner.playbook import PLAYBOOK, Playbook
from refitfsm.planner.requests import Request
from refitfsm.replay import replay
from refitfsm.sim.journals import Recorded, recorded

RULES = policies.load("always_on").rules


@pytest.fixture(scope="module")
def journals() -> list[Recorded]:
    return list(recorded(1))


def test_the_journals_show_what_there_is_to_forge(journals: list[Recorded]) -> None:
    """They hold, are decided the same again, and have every kind of input and of turn in them."""
    for journal in journals:
        verify(journal.lines)
        assert replay(journal.lines).difference is None
    text = b"".join(line for journal in journals for line in journal.lines)
    for word in ("request", "tick", "abandon"):
        assert f'"given":"{word}"'.encode() in text
    for word in ("opened", "refused", "absorbed", "dropped", "aborting", "committed", "closed"):
        assert f'"turn":"{word}"'.encode() in text


def test_every_corruption_is_noticed(journals: list[Recorded]) -> None:
    """None holds but cuts, which lack an end, and what the planner itself would have written."""
    fates: Counter[Fate] = Counter()
    for tried in attempts(journals, 390, "ci"):
        assert tried.wrong == ()
        assert tried.by_hash == tried.made
        fates.update(tried.fates)
        if tried.kind == CUT:
            assert tried.fates[Fate.ENDS_EARLY] == tried.made
        elif not tried.kind.startswith("forged"):
            assert tried.fates[Fate.REJECTED] == tried.made
    assert fates.total() >= 390
    assert fates[Fate.REJECTED] > 0.8 * fates.total()


@pytest.mark.parametrize("kind", KINDS)
def test_corruptions_are_their_seed(journals: list[Recorded], kind: str) -> None:
    """The same seed makes the same corruptions, and none of them is the journal itself."""
    lines = journals[0].lines
    once, again = (list(islice(corruptions(lines, kind, random.Random(5)), 4)) for _ in range(2))
    assert once == again
    assert all(each.lines != lines for each in once)


def aborted(plays: Playbook) -> list[bytes]:
    """A flush that is taken back while it drains, by a planner with these plays."""
    journal = MemoryJournal(header("run", RULES, ["a"], "2026-01-01T00:00:00+00:00"))
    fleet, now_s, report = FleetView.of("a"), 0.0, Report(capabilities=Capabilities("0.5.23"))
    waiting: list[Input] = [Request(Goal.ENROL)]
    later: list[Input] = [Abandon("enough"), Request(Goal.FLUSH)]
    while waiting or later:
        given = waiting.pop(0) if waiting else later.pop()
        now_s += 1.0
        decision = decide(fleet, given, now_s, RULES, plays)
        fleet = decision.fleet
        journal.append((*noted(given), *decision.records), now_s)
        for issued in decision.commands:
            name = DONE[issued.command.kind]
            answer = ServerEvent("a", Event(name, cycle=issued.cycle, seq=issued.seq, report=report))
            waiting.append(answer)
        if isinstance(given, Request) and given.goal is Goal.FLUSH:
            waiting.insert(0, later.pop())
    journal.close()
    return journal.lines


def test_what_holds_and_no_planner_would_have_written_is_told() -> None:
    """A legal journal of another planner is no run of this one: such a corruption counts as not noticed."""
    lazy = PLAYBOOK._replace(going_back=dict.fromkeys(Goal, ()))
    assert fate(Corruption("forged", "", aborted(PLAYBOOK)))[0] is Fate.ANOTHER
    assert fate(Corruption("forged", "", aborted(lazy)))[0] is Fate.HOLDS
    assert fate(Corruption(CUT, "", aborted(PLAYBOOK)))[0] is Fate.HOLDS
