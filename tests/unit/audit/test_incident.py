"""A run of production becomes a scenario in which the same comes about."""

import pytest

from refitfsm.errors import AuditError, ConfigError
from refitfsm.model.fleet import Goal
from refitfsm.sim.incident import Incident, read_incident
from refitfsm.sim.incident_scenario import reproduce
from refitfsm.sim.journals import Recorded, recorded


@pytest.fixture(scope="module")
def journals() -> dict[str, Recorded]:
    return {journal.name: journal for journal in recorded(1)}


def test_every_incident_comes_about_again(journals: dict[str, Recorded]) -> None:
    """Whatever befell a simulated fleet befalls one that plays its journal's scenario: call by call."""
    calls = troubles = 0
    for journal in journals.values():
        incident = read_incident(journal.lines, journal.name)
        made = reproduce(incident)
        assert made.wrong == ()
        assert made.played == made.recorded
        assert made.good
        calls += len(made.recorded)
        troubles += sum(len(call.troubles) for call in incident.calls)
    assert calls > 50
    assert troubles > 5


def troubled(journals: dict[str, Recorded]) -> tuple[Incident, int]:
    """A run, and the number of a call that did not reach its goal because of a server."""
    for journal in journals.values():
        incident = read_incident(journal.lines, journal.name)
        for at, call in enumerate(incident.calls):
            if call.ending.how == "aborted" and call.troubles and call.given_up_at is None:
                return incident, at
    raise AssertionError("nobody had trouble")


def test_a_scenario_without_the_trouble_is_not_the_same(journals: dict[str, Recorded]) -> None:
    """Where a fault is missing the call ends otherwise, and that is said."""
    incident, at = troubled(journals)
    kept = list(incident.calls[at].troubles)
    incident.calls[at].troubles.clear()
    made = reproduce(incident)
    incident.calls[at].troubles.extend(kept)
    assert not made.good
    assert made.same == at
    assert made.wrong


def test_what_was_asked_is_read_from_the_journal(journals: dict[str, Recorded]) -> None:
    """The first call is the connection, and each has how it ended."""
    for journal in journals.values():
        incident = read_incident(journal.lines, journal.name)
        assert (incident.calls[0].goal, incident.calls[0].ending.how) == (Goal.ENROL, "reached")
        assert incident.head.servers == ("s0", "s1")
        assert all(call.ending.how != "open" for call in incident.calls)
    short = next(iter(journals.values())).lines[:6]
    assert [call.ending.how for call in read_incident(short, "short").calls] == ["open"]
    with pytest.raises(AuditError):
        read_incident([*short[:2], *short[3:]], "broken")


def test_a_fleet_that_is_too_large_is_refused(journals: dict[str, Recorded]) -> None:
    """A scenario has at most 64 servers, and a larger run is named with its size."""
    incident = read_incident(next(iter(journals.values())).lines, "run")
    many = incident.head._replace(servers=tuple(map(str, range(100))))
    with pytest.raises(ConfigError, match="100 servers"):
        reproduce(incident._replace(head=many))
