"""How SGLang's answers are read: the status is not enough, the body is."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from refitfsm.drivers.base import Observation
from refitfsm.drivers.transport import Reply
from refitfsm.model.values import NOTHING_REPORTED, CommandKind, EventName, Report
from refitfsm.weights.proof import RankSums

WORDS_MAX = 300
"""Characters of a server's words that go into a detail."""


class Answer(NamedTuple):
    """A reply, read."""

    status: int
    fields: dict[str, object]
    """The JSON object, or empty."""
    value: object
    """What the body holds: JSON, or text where it is none."""
    words: str
    """What the server said, short."""


class Ended(Exception):
    """A call ended otherwise than well; carries the observation."""

    def __init__(self, observation: Observation) -> None:
        super().__init__(observation.detail)
        self.observation = observation


_SAYS_SUCCESS: dict[CommandKind, Callable[[Answer], bool]] = {
    CommandKind.FLUSH: lambda answer: str(answer.value).startswith("Cache flushed"),
    CommandKind.PAUSE: lambda answer: answer.fields.get("status") == "ok",
    CommandKind.CONTINUE: lambda answer: answer.fields.get("status") == "ok",
    CommandKind.RELEASE: lambda answer: answer.value is None,
    CommandKind.RESUME: lambda answer: answer.value is None,
}
"""What SGLang says when it has done these; when it has done anything else it says `success: true`."""


def read(reply: Reply) -> Answer:
    """Read a reply; a body that is no JSON object has no fields, and its text is its words."""
    try:
        data = msgspec.json.decode(reply.body) if reply.body else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        data = reply.body.decode(errors="replace")
    fields = data if isinstance(data, dict) else {}
    said = fields.get("message") or fields.get("error") or (data if isinstance(data, str) else "")
    if isinstance(said, dict):
        said = said.get("message", said)
    words = " ".join(str(said).split())[:WORDS_MAX]
    return Answer(reply.status, fields, data, f"{reply.status}: {words}" if words else str(reply.status))


def judge(
    answer: Answer, kind: CommandKind, done: EventName, report: Report = NOTHING_REPORTED
) -> Observation:
    """How a control call ended.

    After a 5xx or a redirect it is unknown whether the call was carried out: something between us and SGLang
    answered, or an exception that SGLang did not catch. SGLang itself says 400, also where it wrote before
    it failed, and that is a failure; every other 400 is a refusal.
    """
    if answer.status >= 500 or 300 <= answer.status < 400:
        return Observation(EventName.LOST, f"no answer of SGLang's, it may be done or not: {answer.words}")
    if answer.status == 200:
        return _of_200(answer, kind, Observation(done, "", report))
    if answer.status == 400 and kind is CommandKind.BEGIN and "already open" in answer.words:
        return Observation(EventName.REFUSED, answer.words, Report(session_open=True))
    if answer.status == 400 and kind is CommandKind.END and "no weight-update session" in answer.words:
        return Observation(EventName.REFUSED, answer.words, Report(session_closed=True))
    if 400 <= answer.status < 500 and not _wrote(answer, kind):
        return Observation(EventName.REFUSED, _with_remedy(answer))
    return Observation(EventName.FAILED, answer.words)


def _of_200(answer: Answer, kind: CommandKind, good: Observation) -> Observation:
    """A 200 is good where it says what SGLang says: a login page answers 200 too."""
    says = _SAYS_SUCCESS.get(kind)
    if says(answer) if says else answer.fields.get("success") is True:
        return good
    if answer.fields.get("success") is False:
        return Observation(EventName.FAILED, answer.words)
    return Observation(EventName.LOST, f"the answer is none of SGLang's: {answer.words}")


def _wrote(answer: Answer, kind: CommandKind) -> bool:
    """Whether a 400 to a push may have come after something was written.

    Validation errors (`object: error`) and a missing session are seen before the payload is looked at.
    """
    if kind is not CommandKind.PUSH:
        return False
    return answer.fields.get("object") != "error" and "must run between" not in answer.words


def _with_remedy(answer: Answer) -> str:
    if answer.status in (401, 403):
        return f"{answer.words}; give the server's api_key or admin_api_key"
    if answer.status == 404:
        return f"{answer.words}; the server does not have this endpoint"
    return answer.words


def checksum_of(fields: Mapping[str, object]) -> str:
    """The checksum of a whole server from /weights_checker: its own, or one made of its ranks' (0.5.12)."""
    whole = fields.get("per_engine_checksum")
    if isinstance(whole, str) and whole:
        return whole
    ranks = fields.get("ranks")
    if not isinstance(ranks, list):
        return ""
    return "+".join(str(rank.get("per_gpu_checksum", "")) for rank in ranks if isinstance(rank, dict))


def rank_sums(fields: Mapping[str, object]) -> tuple[RankSums, ...]:
    """Each rank's checksums from /weights_checker.

    A rank's place is an object up to 0.5.16, and a list with one for each model of the process since.
    """
    ranks = fields.get("ranks")
    found = []
    for rank in ranks if isinstance(ranks, list) else ():
        place = rank.get("parallelism_info") if isinstance(rank, dict) else None
        sums = rank.get("checksums") if isinstance(rank, dict) else None
        if isinstance(place, list):
            place = next((item for item in place if isinstance(item, dict)), None)
        if isinstance(place, dict) and isinstance(sums, dict):
            tp_rank = place.get("tp_rank", 0)
            found.append(RankSums(tp_rank if isinstance(tp_rank, int) else 0, sums))
    return tuple(found)


def first_values(answer: Answer) -> tuple[float | None, ...] | None:
    """What /get_weights_by_name has read: the first row of a matrix, or a vector as far as it was asked for.

    None if the server cannot read that tensor back. A value is None where it is no finite number.

    Raises:
        Ended: it is no answer to the question.
    """
    if answer.status == 400 and "Get parameter by name failed" in answer.words:
        return None
    if answer.status != 200:
        observation = judge(answer, CommandKind.VERIFY, EventName.VERIFIED)
        raise Ended(observation._replace(detail=f"read back: {observation.detail}"))
    row = answer.value
    if isinstance(row, list) and row and isinstance(row[0], list):
        row = row[0]
    if not isinstance(row, list) or not all(value is None or isinstance(value, int | float) for value in row):
        raise Ended(Observation(EventName.LOST, "read back: the answer is none of SGLang's"))
    return tuple(row)
