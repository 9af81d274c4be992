"""Scripts of a fleet's life, text in, text out: what the planner does, readable as an incident.

A script is a list of lines that start with `>`; what follows each is what the planner answered.

    > servers a b                          a fleet of servers of which nothing is known
    > policy colocated on_failure=hold     rules, with changes
    > caps sessions memory_saver           what enrolment will report
    > request refit 1 2                    a goal, its version and the number of chunks
    > answer a ok                          the command in flight to `a` ended well; or refused, failed, lost
    > all ok                               answer everything, server by server, until nothing is in flight
    > die a                                a process is gone
    > abandon                              whoever asked for the cycle leaves
    > time 61                              time moves to this second
    > show a                               what is believed of a server
"""

from collections.abc import Callable, Iterator

from refitfsm import policies
from refitfsm.machine import Referee
from refitfsm.model.fleet import FleetView, Goal
from refitfsm.model.laws import broken
from refitfsm.model.records import Issued, ServerRecord
from refitfsm.model.rules import FailurePolicy, Rules
from refitfsm.model.table import Verdict
from refitfsm.model.values import DONE, Capabilities, Command, CommandKind, Event, EventName, Report
from refitfsm.planner.cycle import Abandon, Decision, Input, ServerEvent, Tick, decide
from refitfsm.planner.requests import Request


class Script:
    """One fleet, driven line by line."""

    def __init__(self) -> None:
        self.rules: Rules = policies.load("colocated").rules
        self.fleet = FleetView.of(())
        self.capabilities = Capabilities("0.5.23", memory_saver=True)
        self.now_s = 0.0
        self.in_flight: dict[str, Issued] = {}
        self.referee = Referee()

    def run(self, line: str) -> Iterator[str]:
        word, *rest = line.split()
        act: Callable[..., Iterator[str]] = getattr(self, f"do_{word}")
        yield from act(*rest)

    # -- setting -------------------------------------------------------------------------------------

    def do_servers(self, *names: str) -> Iterator[str]:
        self.fleet = FleetView.of(names)
        yield from ()

    def do_policy(self, name: str, *changes: str) -> Iterator[str]:
        self.rules = policies.load(name).rules
        for change in changes:
            key, value = change.split("=")
            given = FailurePolicy(value) if key == "on_failure" else int(value)
            self.rules = self.rules._replace(**{key: given})
        yield from ()

    def do_caps(self, *names: str) -> Iterator[str]:
        self.capabilities = Capabilities("x", **dict.fromkeys(names, True))
        yield from ()

    # -- inputs --------------------------------------------------------------------------------------

    def do_request(self, goal: str, version: str = "0", chunks: str = "0") -> Iterator[str]:
        yield from self.decide(Request(Goal(goal), int(version), (100,) * int(chunks)))

    def do_answer(self, server: str, outcome: str, *words: str) -> Iterator[str]:
        issued = self.in_flight.pop(server)
        kind = issued.command.kind
        event = DONE[kind] if outcome == "ok" else EventName(outcome)
        report = Report(
            capabilities=self.capabilities if kind is CommandKind.ENROL else Capabilities(),
            version=issued.command.version if kind is CommandKind.VERIFY else -1,
            session_open="already open" in " ".join(words),
            session_closed="no session" in " ".join(words),
            paused="paused" in words,
        )
        answered = Event(event, cycle=issued.cycle, seq=issued.seq, report=report, detail=" ".join(words))
        yield from self.decide(ServerEvent(server, answered))

    def do_all(self, outcome: str) -> Iterator[str]:
        while self.in_flight:
            yield from self.do_answer(min(self.in_flight), outcome)

    def do_die(self, server: str) -> Iterator[str]:
        yield from self.decide(ServerEvent(server, Event(EventName.DIED, detail="killed")))

    def do_abandon(self) -> Iterator[str]:
        yield from self.decide(Abandon("its caller was cancelled"))

    def do_time(self, now_s: str) -> Iterator[str]:
        self.now_s = float(now_s)
        yield from self.decide(Tick())

    def do_show(self, server: str) -> Iterator[str]:
        view = self.fleet.servers[server]
        content = view.content
        resident = " ".join(sorted(view.resident)) or "nothing"
        yield (
            f"  {server}: {view.state}, gate {view.gate}, {view.condition}, resident {resident},"
            f" content {content.kind} {content.version}{' proved' if content.proved else ''}"
        )

    # -- output --------------------------------------------------------------------------------------

    def decide(self, given: Input) -> Iterator[str]:
        decision = decide(self.fleet, given, self.now_s, self.rules)
        self.fleet = decision.fleet
        law = broken(self.fleet.servers.values(), self.fleet.facts)
        assert law is None, law
        yield from self.told(decision)
        for issued in decision.commands:
            self.in_flight[issued.server] = issued
        for name in [name for name in self.in_flight if self.fleet.servers[name].pending is None]:
            del self.in_flight[name]

    def told(self, decision: Decision) -> Iterator[str]:
        if decision.refusal is not None:
            yield "  refused: {} ({}): {}: {}".format(*decision.refusal)
        for record in decision.records:
            if not isinstance(record, ServerRecord):
                reason = f" ({record.reason})" if record.reason else ""
                yield f"  cycle {record.turn}{reason}, serving {record.serving_after}"
                continue
            self.referee.check(record)
            command = record.event.command
            if command is not None:
                yield f"  {record.server} <- {said(command)}"
                continue
            moved = record.before.state is not record.after.state
            state = f" -> {record.after.state}" if moved else ""
            ignored = " (ignored)" if record.verdict is Verdict.IGNORE else ""
            yield f"  {record.server} {record.event.name}{state}{ignored}"


def said(command: Command) -> str:
    """A command in a few words."""
    if command.tags:
        return f"{command.kind} {' '.join(sorted(command.tags))}"
    if command.kind is CommandKind.PUSH:
        return f"push {command.chunk + 1} of {command.chunks}"
    return command.kind.value


def play(text: str) -> str:
    """The script with the planner's answers in place of whatever answers it had."""
    script = Script()
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            out += [line, *script.run(line.removeprefix("> "))]
        elif not line.startswith("  "):
            out.append(line)
    return "\n".join(out) + "\n"
