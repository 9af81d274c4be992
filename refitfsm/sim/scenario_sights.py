"""What may be seen in a scenario, by name: what must never be, and what a scenario is about."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

LAWS: Final[Mapping[str, str]] = {
    "server_dies_of_a_call": "A server dies, and nobody killed it.",
    "undefined_weights_answer": "An answer is made by weights that nobody published: undefined or torn.",
    "mixed_versions_answer": "One answer is made by more than one version.",
    "stale_cache_answers": "An answer is made with cache entries of other weights.",
    "wrong_label_answers": "An answer says another version than made it.",
    "other_version_answers": "An answer is made by another version than the fleet serves.",
    "belief_is_false": "What a controller believes of a server at rest is not so.",
    "law_is_broken": "A controller stops because one of its own laws is broken.",
    "odd_error": "A step raises something that is no error of a fleet.",
    "journal_does_not_hold": "The verifier refuses the journal.",
    "something_never_ends": "A step does not end.",
    "loan_is_not_returned": "What was lent to a server that took it is never settled.",
}
"""What may never be seen where a fleet is played, whatever its scenario says."""

OF_EVERYBODY: Final = ("odd_error", "something_never_ends")
"""Laws that hold by hand as well: where they do not, the scenario is wrong."""

EVENTS: Final[Mapping[str, str]] = {
    "call_is_sent": "A call: SERVER METHOD PATH BODY.",
    "answer_is_made": "Whoever asked for it: SERVER VERSION, by the weights that made it, or unpublished.",
    "call_has_no_answer": "A call by hand, in the time that it is waited for: SERVER PATH.",
    "fault_strikes": "A fault befalls a call: SERVER FAULT PATH.",
    "server_dies": "A server is gone, whatever killed it: SERVER CAUSE.",
    "server_drops_out": "A cycle goes on without a server: SERVER REASON.",
    "server_is_suspect": "It is not known what a server has done.",
    "server_is_quarantined": "A server may hold mixed weights.",
    "version_is_served": "The fleet serves another version.",
    "cycle_commits": "A call of the owner succeeds: CONTROLLER CALL.",
    "cycle_aborts": "A cycle was begun and did not reach its goal: the message.",
    "call_is_refused": "A call of the owner is refused before anything is sent: the message.",
    "connect_is_refused": "A controller does not take the servers: the message.",
    "request_is_answered": "Through the fleet: SERVER VERSION REASON.",
    "request_is_cut_short": "An answer through the fleet ends where a refit began.",
    "request_is_turned_away": "No gate is open: the message.",
    "request_fails": "A request through the fleet has no answer: the message.",
    "trainer_has_no_room": "A GPU does not have the memory that a process takes.",
    "serving_at_the_end": "At the end: how many servers admit requests.",
    "paused_at_the_end": "At the end: a server that lives and is paused.",
    "session_at_the_end": "At the end: a server that lives and has an update session open.",
}
"""What may be seen beside, and is neither good nor bad by itself."""

SIGHTS: Final[Mapping[str, str]] = {**LAWS, **EVENTS}

_ANSWER_LAWS: Final = {
    "no_answer_from_undefined_or_torn_weights": "undefined_weights_answer",
    "no_answer_from_mixed_versions": "mixed_versions_answer",
    "no_answer_from_a_stale_cache": "stale_cache_answers",
    "no_answer_under_another_versions_label": "wrong_label_answers",
}


def of_answer_law(sentence: str) -> str:
    """The name here of what `sim.laws.wrong_answer` says in a sentence."""
    return _ANSWER_LAWS[sentence.partition(":")[0]]


class Sight(NamedTuple):
    """Something that was seen."""

    at_s: float
    name: str
    words: str

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s: {self.name}: {self.words}"


class Wanted(NamedTuple):
    """Something to look for: a sight, and what has to stand in its words, as whole words."""

    name: str
    text: str = ""

    @classmethod
    def of(cls, written: str) -> "Wanted":
        """`NAME` or `NAME: TEXT`.

        Raises:
            ValueError: there is no such sight.
        """
        name, _, text = written.partition(":")
        if name not in SIGHTS:
            raise ValueError(f"{written!r}: nothing of that name can be seen; there are {', '.join(SIGHTS)}")
        return cls(name, text.strip())

    def first(self, seen: Iterable[Sight]) -> Sight | None:
        """The first sight that is looked for, or None."""
        pattern = re.compile(rf"(?<!\w){re.escape(self.text)}(?!\w)") if self.text else None
        for sight in seen:
            if sight.name == self.name and (pattern is None or pattern.search(sight.words)):
                return sight
        return None

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name
