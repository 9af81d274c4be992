"""Faults between a client and a simulated server, and the words they are written in.

A fault is written `KIND[=ARG]@PATH[:NTH]`:

- PATH is a path such as `/flush_cache`, or `*` for every call.
- NTH counts the calls of that path from 1: `2` is the second only, `2+` the second and all after it,
  `*` all of them. Left out it is `1`.
- KIND and ARG:

| kind | what happens |
| --- | --- |
| `refuse` | the connection is refused; nothing is applied |
| `lose-request` | the connection breaks before the server sees the call |
| `lose-answer` | the call is applied, then the connection breaks |
| `delay=SECONDS` | the call is applied, its answer comes this much later |
| `slow=SECONDS` | the call reaches the server this much later |
| `duplicate` | the server gets the call twice, one after the other; the first answer counts |
| `status-before=CODE` | an answer of this status instead; nothing is applied |
| `status-after=CODE` | the call is applied, and this status is answered |
| `success-false=CODE` | nothing is applied; this status with `"success": false` (left out: 200) |
| `lie` | nothing is applied, and the answer says it was |
| `garble` | the call is applied, and its answer is not what it should be |
| `corrupt` | the call is applied, then one tensor of the weights is overwritten with noise |
| `hang-before`, `hang-after` | no answer ever comes; without or with the call applied |
| `kill` | the server is killed when the call arrives |
| `kill-after` | the call is applied, and the server is killed before it answers |

Examples: `kill@/update_weights_from_tensor:2`, `lose-answer@/release_memory_occupation`, `delay=30@*:5+`.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple, Protocol


class Kind(StrEnum):
    """What goes wrong."""

    REFUSE = "refuse"
    LOSE_REQUEST = "lose-request"
    LOSE_ANSWER = "lose-answer"
    DELAY = "delay"
    SLOW = "slow"
    DUPLICATE = "duplicate"
    STATUS_BEFORE = "status-before"
    STATUS_AFTER = "status-after"
    SUCCESS_FALSE = "success-false"
    LIE = "lie"
    GARBLE = "garble"
    CORRUPT = "corrupt"
    HANG_BEFORE = "hang-before"
    HANG_AFTER = "hang-after"
    KILL = "kill"
    KILL_AFTER = "kill-after"


_SECONDS: Final = frozenset({Kind.DELAY, Kind.SLOW})
_STATUS: Final = frozenset({Kind.STATUS_BEFORE, Kind.STATUS_AFTER, Kind.SUCCESS_FALSE})
_DEFAULT_STATUS: Final = {Kind.SUCCESS_FALSE: 200.0, Kind.STATUS_BEFORE: 502.0, Kind.STATUS_AFTER: 502.0}
_SPEC: Final = re.compile(r"([a-z-]+)(?:=([^@]*))?@(\*|/[^:\s]*)(?::(\*|\d+\+?))?")


class Fault(NamedTuple):
    """One kind of fault, and which calls it befalls."""

    kind: Kind
    argument: float
    """Seconds or an HTTP status, by the kind; else 0."""
    path: str
    """A path, or "*"."""
    first: int
    """Number of the first call it befalls, from 1."""
    last: int | None
    """Number of the last one; None for all after the first."""

    def befalls(self, path: str, number: int) -> bool:
        """Whether it befalls the `number`-th call of `path`, or of all paths where it is for all."""
        if self.path not in {"*", path}:
            return False
        return self.first <= number and (self.last is None or number <= self.last)

    @property
    def spec(self) -> str:
        """The words that `parse_fault` reads it from."""
        argument = f"={self.argument:g}" if self.kind in _SECONDS | _STATUS else ""
        last = {None: "+", self.first: ""}.get(self.last, f" to {self.last}")
        return f"{self.kind}{argument}@{self.path}:{self.first}{last}"


class FaultSource(Protocol):
    """Says what goes wrong with each call."""

    def draw(self, path: str) -> Fault | None:
        """The fault that befalls this call of `path`, if any. Each call is asked about once."""
        ...


class FaultPlan:
    """A fixed list of faults; the first that befalls a call is the one."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = tuple(faults)
        self.struck: list[tuple[str, Fault]] = []
        """What has befallen which path, in order."""
        self._calls: dict[str, int] = {}

    def draw(self, path: str) -> Fault | None:
        """Count the call, and say what befalls it."""
        numbers = {}
        for key in (path, "*"):
            self._calls[key] = numbers[key] = self._calls.get(key, 0) + 1
        for fault in self.faults:
            number = numbers["*"] if fault.path == "*" else numbers[path]
            if fault.befalls(path, number):
                self.struck.append((path, fault))
                return fault
        return None


def parse_fault(spec: str) -> Fault:
    """A fault from its words.

    Raises:
        ValueError: they are not such; one line that says what is wrong.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(f"fault {spec!r}: write KIND[=ARG]@PATH[:NTH], such as kill@/flush_cache:2")
    name, argument, path, nth = match.groups()
    if name not in set(Kind):
        raise ValueError(f"fault {spec!r}: {name!r} is no kind of fault; there are {', '.join(Kind)}")
    kind = Kind(name)
    first, last = _range(spec, nth)
    return Fault(kind, _argument(spec, kind, argument), path, first, last)


def _argument(spec: str, kind: Kind, argument: str | None) -> float:
    if kind in _SECONDS:
        if argument is None or not re.fullmatch(r"\d+(\.\d+)?", argument):
            raise ValueError(f"fault {spec!r}: {kind} needs seconds, such as {kind}=2.5@/flush_cache")
        return float(argument)
    if kind in _STATUS:
        if argument is None:
            return _DEFAULT_STATUS[kind]
        if not re.fullmatch(r"[2-5]\d\d", argument):
            raise ValueError(f"fault {spec!r}: {kind} needs an HTTP status, such as {kind}=502@/flush_cache")
        return float(argument)
    if argument is not None:
        raise ValueError(f"fault {spec!r}: {kind} takes no argument")
    return 0.0


def _range(spec: str, nth: str | None) -> tuple[int, int | None]:
    if nth is None:
        return 1, 1
    if nth == "*":
        return 1, None
    number = int(nth.removesuffix("+"))
    if number < 1:
        raise ValueError(f"fault {spec!r}: calls are counted from 1")
    return number, None if nth.endswith("+") else number
