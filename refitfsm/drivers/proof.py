"""Proof of content over HTTP: the checksums that a server reports, and the values that it reads back."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from refitfsm.drivers import answers
from refitfsm.drivers.answers import Ended
from refitfsm.drivers.base import Observation
from refitfsm.drivers.push import Aside
from refitfsm.drivers.transport import Transport
from refitfsm.model.values import CommandKind, EventName, VerifyLevel
from refitfsm.weights.offer import Target
from refitfsm.weights.proof import Comparison, ProvesContent
from refitfsm.weights.readback import Readback, Sample, ShowsValues, choose, is_same, proved_words, shown
from refitfsm.weights.source import WeightSource

OTHERWISE = "use verify = checksum, or content, which compares checksums"
"""What to do where a server reads nothing back."""

READ_BACK = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Exaone4", "Granite", "GraniteSWA", "IQuestCoder", "InternLM3", "Llama", "Llama4", "Ministral3"),
        *("Mistral", "OPT", "Phi3", "TeleFLM"),
    )
)
"""Architectures whose code can read tensors back, as read in the sources of 0.5.23."""


class CannotRead(Exception):
    """The server reads nothing back that could be compared; the message says why."""


class Prover(NamedTuple):
    """Asks one server what it holds. Each call ends with words, or raises `Ended`."""

    transport: Transport
    aside: Aside
    """Where the source's part of the work is done."""
    info: Callable[[], Awaitable[Mapping[str, object]]]
    """Reads /server_info."""
    target: Target
    on_cpu: bool

    async def checksums(self) -> Mapping[str, object]:
        """What /weights_checker reports. It kills a server whose weights are released."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        observation = answers.judge(answer, CommandKind.VERIFY, EventName.VERIFIED)
        if observation.event is not EventName.VERIFIED:
            why = f"checksum: {observation.detail}; use verify = version if the server cannot make one"
            raise Ended(observation._replace(detail=why))
        return answer.fields

    async def content(self, source: WeightSource, fields: Mapping[str, object]) -> str:
        """In words, that the reported checksums are those of the pushed weights.

        What was pushed and is in no tensor that could be compared is sampled by reading it back.
        """
        found = await self._compared(source, fields)
        if found.differing or not found.compared:
            remedy = "" if found.differing else "; use verify = sample, or checksum"
            raise Ended(Observation(EventName.FAILED, f"content: {found.words}{remedy}"))
        if not found.uncovered:
            return found.words
        try:
            read = await self._read_back(source, found.uncovered)
        except CannotRead as error:
            return proved_words(found, str(error))
        if read.differing:
            raise Ended(Observation(EventName.FAILED, f"content: {read.words(len(found.uncovered))}"))
        return proved_words(found, read)

    async def sample(self, source: WeightSource) -> str:
        """In words, that a few tensors begin with the values that were pushed."""
        names = source.manifest.by_name
        try:
            read = await self._read_back(source, names)
        except CannotRead as error:
            why = f"sample: nothing was compared, {error}; {OTHERWISE}"
            raise Ended(Observation(EventName.FAILED, why)) from error
        if read.differing:
            raise Ended(Observation(EventName.FAILED, f"sample: {read.words(len(names))}"))
        return read.words(len(names))

    async def _compared(self, source: WeightSource, fields: Mapping[str, object]) -> Comparison:
        if not isinstance(source, ProvesContent):
            raise Ended(Observation(EventName.FAILED, "content: these weights have no checksums here"))
        ranks, target = answers.rank_sums(fields), self.target
        try:
            return await self.aside(lambda: source.compare(ranks, target, on_cpu=self.on_cpu))
        except Exception as error:
            raise Ended(Observation(EventName.FAILED, f"content: {error or repr(error)}")) from error

    async def _read_back(self, source: WeightSource, among: Collection[str]) -> Readback:
        """Read a few of these tensors back.

        Raises:
            CannotRead: nothing could be compared.
        """
        values = shown(source)
        if values is None:
            raise CannotRead("the values of these weights cannot be seen here")
        samples = choose(source.manifest, among, tp_size=len(self.target.ranks), on_cpu=self.on_cpu)
        if not samples:
            raise CannotRead("none of these tensors is of a kind that SGLang reads back")
        if why := unforeseen(await self.info()):
            raise CannotRead(why)
        found = {sample.name: await self._holds(values, sample) for sample in samples}
        held, differing, unread = (
            tuple(name for name, good in found.items() if good is wanted) for wanted in (True, False, None)
        )
        if len(unread) == len(found):
            raise CannotRead("the server cannot read weights back: the code of few models can, as Llama's")
        return Readback(held, differing, unread)

    async def _holds(self, values: ShowsValues, sample: Sample) -> bool | None:
        """Whether the server's tensor begins as the source's does; None if it cannot be read back."""
        fields = {"name": sample.name, "truncate_size": sample.rows}
        read = answers.first_values(await self._post("/get_weights_by_name", fields))
        if read is None:
            return None
        try:
            sent = await self.aside(lambda: values.head(sample.name, sample.size))
        except Exception as error:
            why = f"read back: {sample.name}: {error or repr(error)}"
            raise Ended(Observation(EventName.FAILED, why)) from error
        return is_same(sample, sent, read)

    async def _post(self, path: str, fields: Mapping[str, object]) -> answers.Answer:
        return answers.read(await self.transport.request("POST", path, msgspec.json.encode(fields)))


def unforeseen(info: Mapping[str, object]) -> str:
    """Why what a server would read back is not foreseen, by its /server_info; empty if it is."""
    for field in ("quantization", "torchao_config"):
        if info.get(field):
            return f"{field} is {info[field]!r}: the server holds other values than were pushed"
    if info.get("dp_size", 1) != 1:
        return f"dp_size is {info['dp_size']!r}: with data parallel attention SGLang reads the wrong rows"
    return ""


async def proved(prover: Prover, level: VerifyLevel, source: WeightSource | None) -> tuple[str, str]:
    """What a level asks for beyond the label: in words, and the server's checksum. Each may be empty.

    Without a source there is nothing to compare with: the weights came back from the server's own memory.
    """
    fields = await prover.checksums() if level.needs_checksums else {}
    words = ""
    if source is not None and level is VerifyLevel.CONTENT:
        words = await prover.content(source, fields)
    elif source is not None and level is VerifyLevel.SAMPLE:
        words = await prover.sample(source)
    return words, answers.checksum_of(fields)
