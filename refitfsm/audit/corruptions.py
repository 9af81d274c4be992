"""Corruptions of a journal: what a careless hand, a broken disk, or a forger makes of it.

Some leave the hashes as they were; a forger makes the chain, the numbers and the steps fit again. What is
left then to find a forgery by is what it says.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, cast

import msgspec

from refitfsm.audit.broken import Broken
from refitfsm.audit.lines import (
    GENESIS,
    ServerBody,
    chain,
    changes_of,
    event_of,
    facts_of,
    guards_of,
    line_of,
    read_body,
    read_header,
)
from refitfsm.audit.plain import Plain

Body = dict[str, Plain]
Lines = Sequence[bytes]


class Corruption(NamedTuple):
    """One journal that is not the one that was written."""

    kind: str
    says: str
    """What was done, and to which line, from 1."""
    lines: list[bytes]


_FORGED: Final = "forged: "
CUT: Final = "cut between two lines"
"""The one kind that holds as far as it goes, by design: so does the journal of a controller that died."""


def corruptions(lines: Lines, kind: str, dice: random.Random) -> Iterator[Corruption]:
    """Corruptions of one kind of `KINDS`, without end. Each says something else than the journal does."""
    victim = Victim(lines)
    make = _MAKERS[kind]
    while True:
        says, changed = make(victim, dice)
        if victim.says_otherwise(changed) if kind.startswith(_FORGED) else changed != victim.lines:
            yield Corruption(kind, says, changed)


class _Envelope(msgspec.Struct):
    hash: str
    body: msgspec.Raw


class Victim:
    """A journal to be corrupted."""

    def __init__(self, lines: Lines) -> None:
        self.lines = list(lines)
        self.bodies = [_body(line) for line in self.lines]
        self.seen = _seen(self.bodies)
        self.places: dict[Plain, list[int]] = {}
        """Of the lines of each kind."""
        for at, body in enumerate(self.bodies):
            self.places.setdefault(body["kind"], []).append(at)

    def says_otherwise(self, changed: Lines) -> bool:
        """Whether lines say something else, whatever their hashes. Not all edits do: a set has no order."""
        return len(changed) != len(self.lines) or any(
            one != other and _meaning(one) != _meaning(other)
            for one, other in zip(self.lines, changed, strict=True)
        )

    def place(self, dice: random.Random) -> int:
        """Of a line that is not the header."""
        return dice.randrange(1, len(self.lines))


_NOTHING: Final = msgspec.Raw()


def _meaning(line: bytes) -> object:
    """What a line says, apart from its hash; of one that says nothing, its bytes."""
    try:
        data = bytes(msgspec.json.decode(line, type=_Envelope).body)
        if b'"kind":"header"' in data:
            return read_header(data)
        body = read_body(data)
        if not isinstance(body, ServerBody):
            return body
        event, facts = event_of(bytes(body.event)), facts_of(bytes(body.facts))
        same = body._replace(event=_NOTHING, facts=_NOTHING, guards=_NOTHING, changed=None)
        return same, event, facts, guards_of(bytes(body.guards)), changes_of(body)
    except (ValueError, KeyError, Broken):
        return line


def _body(line: bytes) -> Body:
    return cast("Body", msgspec.json.decode(line)["body"])


def rechained(bodies: Sequence[Body]) -> list[bytes]:
    """Lines with hashes that fit."""
    previous, lines = GENESIS, []
    for body in bodies:
        data = msgspec.json.encode(body)
        previous = chain(previous, data)
        lines.append(line_of(previous, data))
    return lines


def _made_to_fit(bodies: Sequence[Body]) -> list[bytes]:
    """Numbers without a gap, steps without a gap, times that do not run backwards, and hashes that fit."""
    fitting: list[Body] = []
    step, last_step, at_s = 0, None, 0.0
    for number, body in enumerate(bodies):
        fitted = {**body, "n": number}
        if "at_s" in body:
            at_s = fitted["at_s"] = max(at_s, cast("float", body["at_s"]))
        if "step" in body:
            step += body["step"] != last_step
            last_step = body["step"]
            fitted["step"] = step
        fitting.append(fitted)
    return rechained(fitting)


# -- whole lines -------------------------------------------------------------------------------------

Shape = Callable[[list[object], int, random.Random], str]
"""Changes a list in place at an index; says what it did."""


def _drop(items: list[object], at: int, _dice: random.Random) -> str:
    at = min(at, len(items) - 2)  # without the last line it is a cut
    del items[at]
    return f"line {at + 1} is dropped"


def _repeat(items: list[object], at: int, dice: random.Random) -> str:
    to = dice.randrange(at, len(items)) + 1
    items.insert(to, items[at])
    return f"line {at + 1} is repeated as line {to + 1}"


def _swap(items: list[object], at: int, dice: random.Random) -> str:
    other = dice.choice((at - 1, at + 1, dice.randrange(1, len(items))))
    other = min(max(other, 1), len(items) - 1)
    items[at], items[other] = items[other], items[at]
    return f"lines {at + 1} and {other + 1} are swapped"


def _move(items: list[object], at: int, dice: random.Random) -> str:
    to = dice.randrange(1, len(items))
    items.insert(to, items.pop(at))
    return f"line {at + 1} is moved to {to + 1}"


Made = tuple[str, list[bytes]]
Maker = Callable[[Victim, random.Random], Made]


def _as_it_is(shape: Shape) -> Maker:
    def make(victim: Victim, dice: random.Random) -> Made:
        items: list[object] = list(victim.lines)
        return shape(items, victim.place(dice), dice), cast("list[bytes]", items)

    return make


def _forged(shape: Shape) -> Maker:
    def make(victim: Victim, dice: random.Random) -> Made:
        items: list[object] = list(victim.bodies)
        says = shape(items, victim.place(dice), dice)
        bodies = cast("list[Body]", items)
        if dice.random() < 0.5:
            _join(bodies, dice)
        return f"{says}, and all fits", _made_to_fit(bodies)

    return make


def _join(bodies: list[Body], dice: random.Random) -> None:
    """A line counts to the step before it, where a forger would want that."""
    at = dice.randrange(1, len(bodies))
    before = bodies[at - 1]
    if "step" in bodies[at] and "step" in before:
        bodies[at] = {**bodies[at], "step": before["step"], "at_s": before["at_s"]}


def _whole_steps(victim: Victim, dice: random.Random) -> Made:
    """A step is dropped, repeated or swapped with the one after it, with all its lines."""
    steps: list[list[Body]] = []
    for body in victim.bodies[1:]:
        if steps and "step" in body and steps[-1][-1].get("step") == body["step"]:
            steps[-1].append(body)
        else:
            steps.append([body])
    at = dice.randrange(len(steps) - 1)
    what = dice.choice(("dropped", "repeated", "swapped"))
    if what == "dropped":
        del steps[at]
    elif what == "repeated":
        steps.insert(at, [{**body, "step": -1} for body in steps[at]])
    else:
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
    bodies = [victim.bodies[0], *(body for step in steps for body in step)]
    return f"step {at + 1} is {what}, and all fits", _made_to_fit(bodies)


# -- bytes -------------------------------------------------------------------------------------------


def _bit(victim: Victim, dice: random.Random) -> Made:
    at = dice.randrange(len(victim.lines))
    line = bytearray(victim.lines[at])
    place, bit = dice.randrange(len(line)), dice.randrange(8)
    line[place] ^= 1 << bit
    says = f"bit {bit} of byte {place + 1} of line {at + 1} is flipped"
    return says, [*victim.lines[:at], bytes(line), *victim.lines[at + 1 :]]


def _torn(victim: Victim, dice: random.Random) -> Made:
    at = dice.randrange(len(victim.lines))
    left = dice.randrange(1, len(victim.lines[at]))
    rest = victim.lines[at + 1 :] if dice.random() < 0.5 else []
    return f"line {at + 1} is cut after {left} bytes", [*victim.lines[:at], victim.lines[at][:left], *rest]


def _cut(victim: Victim, dice: random.Random) -> Made:
    left = victim.place(dice)
    return f"the journal is cut after line {left}", victim.lines[:left]


# -- values ------------------------------------------------------------------------------------------

Path = tuple[str | int, ...]


def _leaves(value: Plain, at: Path = ()) -> Iterator[tuple[Path, Plain]]:
    """Every value inside a value with the way to it, itself included."""
    yield at, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*at, index))


def _shape_of(path: Path) -> Path:
    """The same for all items of a list."""
    return tuple(-1 if isinstance(part, int) else part for part in path)


def _seen(bodies: Sequence[Body]) -> Mapping[Path, list[Plain]]:
    """Every value that stands somewhere, by its place: what a forger takes for likely."""
    seen: dict[Path, list[Plain]] = {}
    for body in bodies:
        for path, value in _leaves(body):
            known = seen.setdefault(_shape_of(path), [])
            if value not in known:
                known.append(value)
    return seen


def _edited(victim: Victim, dice: random.Random) -> Made:
    """One value of one line is another. Each kind of line and each of its fields as often as another."""
    at = dice.choice(victim.places[dice.choice(tuple(victim.places))])
    body = msgspec.json.decode(msgspec.json.encode(victim.bodies[at]))
    field = dice.choice(tuple(body))
    path, old = dice.choice(list(_leaves(body[field], (field,))))
    inside = body
    for part in path[:-1]:
        inside = inside[part]
    key = path[-1]
    if dice.random() < _LOST:
        del inside[key]
        said = "lost"
    else:
        likely = victim.seen[_shape_of(path)]
        new = dice.choice(likely) if dice.random() < 0.5 and len(likely) > 1 else _other(old, dice)
        inside[key] = new
        said = f"{msgspec.json.encode(new).decode()[:60]}"
    where = ".".join(map(str, path))
    bodies = [*victim.bodies[:at], body, *victim.bodies[at + 1 :]]
    return f"line {at + 1}: {where} is {said}, and the chain fits", rechained(bodies)


_LOST: Final = 0.15
"""So often a field is taken out in place of being changed."""


def _other(value: Plain, dice: random.Random) -> Plain:
    """Another value of the same kind, close to it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        steps = (-1, 1, 2, 1000) if isinstance(value, int) else (-1.0, -0.001, 1e-6, 0.001, 1.0, 60.0)
        return value + dice.choice(steps)
    if isinstance(value, str):
        return value + "x" if dice.random() < 0.5 else value[:-1]
    if isinstance(value, list):
        return _other_items(value, dice)
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if dice.random() < 0.5}
    return 0


def _other_items(items: list[Plain], dice: random.Random) -> list[Plain]:
    changed = list(items)
    if changed and dice.random() < 0.7:
        del changed[dice.randrange(len(changed))]
    else:
        changed.insert(0, changed[-1] if changed else "x")
    return changed


_MAKERS: Final[Mapping[str, Maker]] = {
    "dropped": _as_it_is(_drop),
    "repeated": _as_it_is(_repeat),
    "swapped": _as_it_is(_swap),
    "moved": _as_it_is(_move),
    "a bit flipped": _bit,
    "truncated": _torn,
    CUT: _cut,
    f"{_FORGED}dropped": _forged(_drop),
    f"{_FORGED}repeated": _forged(_repeat),
    f"{_FORGED}swapped": _forged(_swap),
    f"{_FORGED}moved": _forged(_move),
    f"{_FORGED}whole steps": _whole_steps,
    f"{_FORGED}edited": _edited,
}
KINDS: Final = tuple(_MAKERS)
