"""A journal holds or does not: nothing that was changed afterwards is accepted."""

import ast
import inspect
import random
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from refitfsm import policies
from refitfsm.audit.journal import FileJournal, MemoryJournal, header
from refitfsm.audit.lines import GENESIS, chain, line_of
from refitfsm.audit.plain import build, plain
from refitfsm.audit.verify import READ_BY_LAWS, verify, verify_file
from refitfsm.errors import AuditError
from refitfsm.model import laws
from refitfsm.model.fleet import FleetView, Goal, holds_served
from refitfsm.model.records import Written
from refitfsm.model.values import DONE, Capabilities, CommandKind, Event, EventName, Report, ServerView
from refitfsm.planner.cycle import Decision, ServerEvent, decide
from refitfsm.planner.inputs import noted
from refitfsm.planner.requests import Request

RULES = policies.load("colocated").rules
CAPABILITIES = Capabilities("0.5.23", sessions=True, memory_saver=True)
HEAD = header("run", RULES, ["a", "b"], "2026-01-01T00:00:00+00:00")
REQUESTS = (
    Request(Goal.ENROL),
    Request(Goal.RELEASE),
    Request(Goal.REFIT, 1, (5, 5)),
    Request(Goal.FLUSH),
    Request(Goal.REFIT, 1, (5,)),
)


def lives() -> Iterator[tuple[float, tuple[Written, ...]]]:
    """The steps of a fleet that goes through a few cycles, one of which fails, with their times."""
    fleet, now_s = FleetView.of("ab"), 0.0

    def step(given: Request | ServerEvent) -> Decision:
        nonlocal fleet, now_s
        now_s += 0.25
        decision = decide(fleet, given, now_s, RULES)
        fleet = decision.fleet
        return decision

    for request in (*REQUESTS, Request(Goal.REFIT, 2, (5, 5))):
        decision = step(request)
        yield now_s, (*noted(request), *decision.records)
        commands = list(decision.commands)
        while commands:
            issued = commands.pop(0)
            kind = issued.command.kind
            fails = kind is CommandKind.PUSH and issued.command.version == 2 and issued.server == "b"
            event = EventName.FAILED if fails else DONE[kind]
            report = Report(capabilities=CAPABILITIES, version=issued.command.version)
            answer = Event(event, cycle=issued.cycle, seq=issued.seq, report=report)
            decision = step(ServerEvent(issued.server, answer))
            yield now_s, decision.records
            commands += decision.commands


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    journal = MemoryJournal(HEAD)
    for at_s, records in lives():
        journal.append(records, at_s)
    journal.close()
    return journal.lines


def rechained(lines: list[bytes]) -> list[bytes]:
    """The same bodies under hashes that fit: what a forger who knows the format would write."""
    previous, out = GENESIS, []
    for line in lines:
        body = bytes(msgspec.json.decode(line, type=dict[str, msgspec.Raw])["body"])
        previous = chain(previous, body)
        out.append(line_of(previous, body))
    return out


def test_a_true_journal_holds(lines: list[bytes]) -> None:
    """What the planner wrote is accepted, and its cycles are counted."""
    found = verify(lines)
    assert (found.cycles, found.committed, found.aborted) == (5, 3, 1)
    assert found.serving_version == 1
    assert found.records == len(lines)


def test_every_edited_byte_is_found(lines: list[bytes]) -> None:
    """A changed byte anywhere breaks the chain or the reading."""
    dice = random.Random(0)
    for _ in range(300):
        index = dice.randrange(len(lines))
        line = bytearray(lines[index])
        at = dice.randrange(len(line))
        line[at] ^= 1 << dice.randrange(7)
        with pytest.raises(AuditError):
            verify([*lines[:index], bytes(line), *lines[index + 1 :]])


@pytest.mark.parametrize("seed", range(60))
def test_dropped_repeated_and_swapped_records_are_found_even_with_fitting_hashes(
    lines: list[bytes], seed: int
) -> None:
    """A forger who makes the chain fit is still found: numbers, states and rules must fit too."""
    dice = random.Random(seed)
    kind = dice.choice(("drop", "repeat", "swap"))
    index = dice.randrange(1, len(lines) - 1)
    changed = list(lines)
    if kind == "drop":
        del changed[index]
    elif kind == "repeat":
        changed.insert(index, changed[index])
    else:
        changed[index], changed[index + 1] = changed[index + 1], changed[index]
    with pytest.raises(AuditError):
        verify(rechained(changed))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"verdict":"take"', b'"verdict":"refuse"'),
        (b'"gate_is_closed",true', b'"gate_is_closed",false'),
        (b'"state":"released"', b'"state":"serving"'),
        (b'"proved":true', b'"proved":false'),
        (b'"serving_after":1', b'"serving_after":2'),
        (b'"turn":"committed"', b'"turn":"closed"'),
        (b'"turn":"aborting"', b'"turn":"committed"'),
        (b'"event":{"name":"verified"', b'"event":{"name":"pushed"'),
        (b'"kv_epoch":null', b'"kv_epoch":1'),
        (b'"server":"a"', b'"server":"b"'),
        (b'"cycle":3', b'"cycle":2'),
        (b'"paused":true', b'"paused":false'),
    ],
)
def test_a_forged_fact_is_found_even_with_fitting_hashes(lines: list[bytes], old: bytes, new: bytes) -> None:
    """A single fact that is changed in one record does not fit its neighbours, the table or a law."""
    places = [index for index, line in enumerate(lines) if old in line]
    assert places
    for index in places:
        forged = lines[index].replace(old, new, 1)
        with pytest.raises(AuditError):
            verify(rechained([*lines[:index], forged, *lines[index + 1 :]]))


@pytest.mark.parametrize(
    ("pattern", "new"),
    [
        (rb'"guards":\[\[.*?\]\],', b'"guards":[],'),
        (rb'("verdict":"take")', rb'\1,"rule":"whatever"'),
        (rb'"n":7,', b'"n":true,'),
        (rb'"closes_s":[0-9.]+', b'"closes_s":9e9'),
        (rb'"members":\["a","b"\]', b'"members":["a"]'),
        (rb'("closes_s":[0-9.]+)(,"busy"|})', rb'\1,"failed":[["a","made up"]]\2'),
    ],
)
def test_a_forged_cycle_or_judgement_is_found_even_with_fitting_hashes(
    lines: list[bytes], pattern: bytes, new: bytes
) -> None:
    """What a record says of its judgement and of its cycle is judged again, against the policy too."""
    places = [index for index, line in enumerate(lines) if re.search(pattern, line)]
    assert places
    for index in places:
        forged = re.sub(pattern, new, lines[index], count=1)
        with pytest.raises(AuditError):
            verify(rechained([*lines[:index], forged, *lines[index + 1 :]]))


def test_a_journal_that_ends_in_a_cycle_says_so(lines: list[bytes]) -> None:
    """A journal cut between two lines holds as far as it goes, and names the cycle it ends in."""
    at = next(index for index, line in enumerate(lines) if b'"event":{"name":"begun"' in line)
    assert (verify(lines[: at + 1]).open_cycle, verify(lines[: at + 1]).ended) == (3, False)
    assert (verify(lines).open_cycle, verify(lines).ended) == (0, True)


@pytest.mark.parametrize(
    "body",
    [b"[" * 5000 + b"]" * 5000, b'{"n":1,"at_s":1' + b"0" * 400 + b"}"],
    ids=["deep nesting", "an endless number"],
)
def test_absurd_lines_are_an_error_like_any_other(lines: list[bytes], body: bytes) -> None:
    """Deep nesting and endless numbers are a verdict, not a crash."""
    hashed = chain(msgspec.json.decode(lines[0])["hash"].encode(), body)
    with pytest.raises(AuditError):
        verify([lines[0], line_of(hashed, body)])


def test_a_cut_line_an_empty_file_and_a_newer_schema_are_named(lines: list[bytes]) -> None:
    """What is no whole journal of this schema gets a clear error."""
    with pytest.raises(AuditError, match="cut off"):
        verify([*lines[:-1], lines[-1][:40]])
    with pytest.raises(AuditError, match="is empty"):
        verify([])
    newer = rechained([lines[0].replace(b'"schema":3', b'"schema":99')])
    with pytest.raises(AuditError, match="schema 99"):
        verify(newer)
    with pytest.raises(AuditError, match="no header"):
        verify(rechained(lines[1:]))


def test_a_file_journal_has_the_same_lines_and_is_never_overwritten(
    tmp_path: Path, lines: list[bytes]
) -> None:
    """Memory and file hold the same bytes; an existing file is refused."""
    path = tmp_path / "audit.jsonl"
    journal = FileJournal(path, HEAD)
    for at_s, records in lives():
        journal.append(records, at_s)
    journal.close()
    assert path.read_bytes().splitlines() == lines
    assert verify_file(path) == verify(lines)
    with pytest.raises(AuditError, match="exists already"):
        FileJournal(path, HEAD)
    with pytest.raises(AuditError, match="closed"):
        journal.append(next(lives())[1], 0.0)


def test_a_full_disk_is_an_error_and_not_a_silent_gap(tmp_path: Path) -> None:
    """When the kernel takes only a part, the append raises: nothing may be issued on it."""
    journal = FileJournal(tmp_path / "audit.jsonl", HEAD)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "audit.jsonl").stat().st_size + 100, before[1]))
    try:
        with pytest.raises(AuditError, match="cannot be written"):
            journal.append(next(lives())[1], 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(AuditError, match="closed"):
        journal.append(next(lives())[1], 0.0)
    assert verify_file(tmp_path / "audit.jsonl").records == 1


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """A journal that cannot be created is an error with the path."""
    with pytest.raises(AuditError, match="cannot be created"):
        FileJournal(tmp_path / "nothing" / "audit.jsonl", HEAD)


def test_values_survive_the_journal() -> None:
    """A view becomes plain data and back without a loss, and what does not fit is refused."""
    view = ServerView("a", capabilities=CAPABILITIES)
    assert build(ServerView, plain(view)) == view
    with pytest.raises(ValueError, match="seq"):
        build(ServerView, plain(view) | {"seq": "1"})  # type: ignore[operator]
    with pytest.raises(ValueError, match="missing"):
        build(ServerView, {"seq": 1})
    with pytest.raises(ValueError, match="unknown"):
        build(ServerView, {"server": "a", "servers": 1})


def test_nothing_follows_the_end(lines: list[bytes]) -> None:
    """A closed journal takes no more, and one that goes on after its end does not hold."""
    end = msgspec.json.decode(lines[-1])
    body = msgspec.json.encode(end["body"] | {"n": len(lines)})
    with pytest.raises(AuditError, match="closed before"):
        verify([*lines, line_of(chain(end["hash"].encode(), body), body)])
    journal = MemoryJournal(HEAD)
    journal.close()
    with pytest.raises(AuditError, match="closed"):
        journal.append(next(lives())[1], 0.0)


def test_the_verdict_names_the_last_hash(lines: list[bytes]) -> None:
    """Kept elsewhere, the hash tells a journal from any other, one that is cut between two lines too."""
    assert verify(lines).hash == msgspec.json.decode(lines[-1])["hash"]
    assert verify(lines[:-1]).hash != verify(lines).hash


def bodies(lines: list[bytes]) -> list[dict[str, object]]:
    return [msgspec.json.decode(line)["body"] for line in lines]


def test_each_step_has_its_input_and_one_time(lines: list[bytes]) -> None:
    """What a planner was given is written, once for each step, with the time that it was told."""
    steps: dict[object, list[dict[str, object]]] = {}
    for body in bodies(lines)[1:-1]:
        steps.setdefault(body["step"], []).append(body)
    assert list(steps) == list(range(1, len(steps) + 1))
    for records in steps.values():
        assert len({body["at_s"] for body in records}) == 1
        assert [body for body in records[1:] if body["kind"] == "input"] == []
    asked = [(body["goal"], body.get("version", 0)) for body in bodies(lines) if body["kind"] == "input"]
    assert asked == [(request.goal.value, request.version) for request in (*REQUESTS, Request(Goal.REFIT, 2))]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"given":"request","goal":"release"', b'"given":"request","goal":"flush"'),
        (b'"given":"request","goal":"release"', b'"given":"tick"'),
        (b'"version":2,"chunk_bytes":[5,5]}', b'"version":2,"chunk_bytes":[5]}'),
        (b'"given":"request","goal":"refit","version":1,"chunk_bytes":[5]', b'"given":"abandon"'),
    ],
)
def test_a_forged_input_is_found_even_with_fitting_hashes(lines: list[bytes], old: bytes, new: bytes) -> None:
    """What a step was given and what was decided have to fit."""
    places = [index for index, line in enumerate(lines) if old in line]
    assert places
    for index in places:
        forged = lines[index].replace(old, new, 1)
        with pytest.raises(AuditError):
            verify(rechained([*lines[:index], forged, *lines[index + 1 :]]))


def test_the_verifier_looks_at_all_that_laws_read() -> None:
    """Views that differ in nothing a law reads are judged once: so each field that one reads has to count."""
    sources = [inspect.getsource(laws), inspect.getsource(holds_served)]
    read = {
        node.attr
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "view"
    }
    assert read - {"pending", "capabilities"} <= set(READ_BY_LAWS)
    below = {
        (node.value.attr, node.attr)
        for node in ast.walk(ast.parse(sources[0]))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
    }
    assert {attr for base, attr in below if base == "capabilities"} == {"weights_backup"}
    assert {attr for base, attr in below if base == "pending"} == {"command"}
    assert {attr for base, attr in below if base == "command"} == {"kind"}
