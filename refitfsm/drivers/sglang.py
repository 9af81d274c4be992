"""The SGLang driver: commands in, HTTP out, observations back. Over any transport.

Every call ends in an observation. The order of calls is none of its business: that is the table's.
"""

import asyncio
import functools
from collections.abc import Mapping

import msgspec

from refitfsm.drivers import answers, dialect, labels
from refitfsm.drivers.answers import Ended
from refitfsm.drivers.base import Observation, ServerGone
from refitfsm.drivers.proof import Prover, proved
from refitfsm.drivers.push import Aside, Load, Making, offer_and_body
from refitfsm.drivers.readiness import POLL_FIRST_S, POLL_MAX_S, PROBE_S, mend_readiness, wait_until_up
from refitfsm.drivers.room import Rooms, needed_bytes
from refitfsm.drivers.transport import AnswerLost, NotSent, Reply, Transport, TransportError, Unreachable
from refitfsm.errors import RequestFailed
from refitfsm.model.records import Issued
from refitfsm.model.states import Tag
from refitfsm.model.values import DONE, NOTHING_REPORTED, Capabilities, EventName, Report
from refitfsm.weights.offer import Offer, RankPlace, Settled, Target

SERVER_INFO = ("/server_info", "/get_server_info")
NAMES_S = 60.0
"""How long a server may take to name its tensors: it passes over its weights for that."""
PROBE_PAUSES_S = (0.05, 0.2, 0.5)
"""Between the tries of a harmless read."""


def _body(fields: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(fields)


def _tags(tags: frozenset[Tag]) -> bytes:
    return _body({"tags": sorted(tag.value for tag in tags)})


class SGLangDriver:
    """Speaks SGLang's protocol to one server.

    Args:
        transport: the server's HTTP interface.
        run_id: names this run in version labels.
        server: the address the server is known by.
        gpus: the GPU UUID of each tensor parallel rank, in rank order, as far as known.
        allow_unknown_version: treat a version outside the known ones as the nearest.
        aside: where the weight source's work is done.
        rooms: measure the GPUs before memory is taken back, shared by the servers of a fleet.
    """

    def __init__(
        self,
        transport: Transport,
        run_id: str,
        *,
        server: str = "",
        gpus: tuple[str, ...] = (),
        allow_unknown_version: bool = False,
        aside: Aside,
        rooms: Rooms | None = None,
    ) -> None:
        self._transport = transport
        self._run_id = run_id
        self._server = server
        self._gpus = gpus
        self._allow_unknown_version = allow_unknown_version
        self._aside = aside
        self._rooms = rooms or Rooms()
        self._capabilities = Capabilities()
        self._labels: tuple[str, ...] = ()
        """The labels that the server may show while it is still the process that was enrolled."""
        self.load: Load | None = None

    # -- the driver's contract -----------------------------------------------------------------------

    async def execute(self, issued: Issued) -> Observation:
        act = getattr(self, f"_{issued.command.kind.value}")
        try:
            observation: Observation = await act(issued)
        except Ended as ended:
            return ended.observation
        except TransportError as error:
            return await self._undelivered(error)
        return observation

    async def _undelivered(self, error: TransportError) -> Observation:
        """What a call that got no answer means."""
        if isinstance(error, NotSent):
            return Observation(EventName.DIED, f"nobody listens at its address ({error})")
        if isinstance(error, Unreachable):
            return Observation(EventName.REFUSED, f"it was not sent: {error}")
        return await self._after_loss(str(error))

    async def generate(self, body: bytes, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._transport.request("POST", "/generate", body)
        except NotSent as error:
            raise ServerGone(f"nobody listens at its address ({error})") from error
        except Unreachable as error:
            raise RequestFailed(f"the request could not be sent ({error}); send it again") from error
        except AnswerLost as error:
            after = await self._after_loss(str(error))
            if after.event is EventName.DIED:
                raise ServerGone(after.detail) from error
            raise RequestFailed(f"the connection broke before the answer ({error}); send it again") from error
        except TimeoutError:
            raise RequestFailed(f"no answer within {timeout_s:g} s") from None
        if reply.status != 200:
            raise RequestFailed(f"the server answered {answers.read(reply).words}")
        return reply.body

    async def tensor_names(self) -> frozenset[str]:
        """The names of the server's own tensors; none if it does not say them.

        Only for a server whose weights are resident, while no command is in flight and none can begin.
        """
        try:
            async with asyncio.timeout(NAMES_S):
                await self._same_process()
                fields = await self._prover().checksums()
        except (Ended, TransportError, TimeoutError):
            return frozenset()
        return frozenset().union(*(rank.checksums for rank in answers.rank_sums(fields)))

    async def aclose(self) -> None:
        await self._transport.aclose()

    # -- calls ---------------------------------------------------------------------------------------

    async def _get(self, *paths: str) -> dict[str, object]:
        """The JSON object at the first of the paths that exists. A harmless read."""
        reply = Reply(404, b"")
        for path in paths:
            async with asyncio.timeout(PROBE_S):
                reply = await self._transport.request("GET", path)
            if reply.status != 404:
                break
        answer = answers.read(reply)
        if answer.status == 200 and answer.fields:
            return answer.fields
        if answer.status in (401, 403):
            raise Ended(
                Observation(EventName.REFUSED, f"{answer.words}; give the server's api_key or admin_api_key")
            )
        raise Ended(Observation(EventName.LOST, f"GET {paths[0]} answered {answer.words}"))

    async def _call(
        self, issued: Issued, path: str, body: bytes | None, report: Report = NOTHING_REPORTED
    ) -> Observation:
        """One control call, judged. Its deadline is the planner's: whoever waits cancels."""
        reply = await self._transport.request("POST", path, body)
        kind = issued.command.kind
        return answers.judge(answers.read(reply), kind, DONE[kind], report)

    async def _label(self) -> str:
        return str((await self._get("/model_info", "/get_model_info")).get("weight_version", ""))

    async def _label_again(self) -> str:
        """The label, read up to four times. Ends the command, unsent, if it cannot be read.

        A read does no harm, and a command that is not sent after one leaves nothing unknown.
        """
        for wait_s in PROBE_PAUSES_S:
            try:
                return await self._label()
            except (AnswerLost, Unreachable, TimeoutError, Ended):
                await asyncio.sleep(wait_s)
        try:
            return await self._label()
        except (AnswerLost, Unreachable, TimeoutError, Ended) as error:
            why = f"it was not sent: /model_info cannot be read ({error or 'no answer'})"
            raise Ended(Observation(EventName.REFUSED, why)) from error

    async def _same_process(self) -> None:
        """Whether the process that was enrolled still answers. Ends the command, unsent, if not."""
        found = await self._label_again()
        if found not in self._labels:
            raise Ended(
                Observation(
                    EventName.DIED,
                    f"another process answers: its weights are labelled {found!r}, not {self._labels[-1]!r};"
                    " it was restarted, somebody else writes to it, or it is given under two addresses",
                )
            )

    async def _after_loss(self, why: str) -> Observation:
        """A connection broke. Only one thing can be learned without harm: whether anybody still listens.

        A process that is being killed still takes connections, and drops or resets them: it is asked again.
        """
        for wait_s in (*PROBE_PAUSES_S, 0.0):
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._transport.request("GET", "/model_info")
            except NotSent:
                return Observation(EventName.DIED, f"the server died during the call ({why})")
            except (AnswerLost, Unreachable):
                await asyncio.sleep(wait_s)
            except TimeoutError:
                break
            else:
                break
        return Observation(EventName.LOST, why)

    # -- commands ------------------------------------------------------------------------------------

    async def _enrol(self, issued: Issued) -> Observation:
        try:
            info = await self._get(*SERVER_INFO)
            model = await self._get("/model_info", "/get_model_info")
            found = dialect.capabilities(info, model, allow_unknown_version=self._allow_unknown_version)
            self._check_gpus(found)
            known = str(model.get("weight_version", "")).startswith(labels.PREFIX + ":")
            ready = await wait_until_up(self._transport, found, issued.deadline_s, known=known)
        except dialect.Misfit as misfit:
            return Observation(EventName.REFUSED, str(misfit))
        except NotSent as error:
            why = f"nobody listens at its address ({error}); start the server, or correct its URL"
            return Observation(EventName.DIED, why)
        except TimeoutError:
            return Observation(EventName.LOST, "it did not answer a harmless read in time")
        if not ready:
            return Observation(
                EventName.ENROLLED,
                "it is not ready: still starting, or paused by somebody else; wait, or restart it",
                Report(found, paused=True),
            )
        stamp = labels.stamp(self._run_id, self._server, str(model.get("weight_version", "")))
        body = _body({"new_version": stamp, "abort_all_requests": False})
        observation = await self._call(issued, "/update_weight_version", body, Report(found))
        if observation.event is EventName.ENROLLED:
            self._capabilities, self._labels = found, (stamp,)
        return observation

    def _check_gpus(self, found: Capabilities) -> None:
        """A payload too few kills the server: the GPUs that were named must be as many as its ranks."""
        if self._gpus and len(self._gpus) != found.tp_size:
            raise dialect.Misfit(
                f"{len(self._gpus)} GPUs are named for it and it has {found.tp_size} tensor parallel ranks;"
                " name one GPU for each rank, or none"
            )

    async def _pause(self, issued: Issued) -> Observation:
        await self._same_process()
        return await self._call(issued, "/pause_generation", _body({"mode": "abort"}))

    async def _flush(self, issued: Issued) -> Observation:
        """Flush until the server is idle enough to accept it: the scheduler lags behind the front end."""
        loop = asyncio.get_running_loop()
        wait_s = POLL_FIRST_S
        while True:
            observation = await self._call(issued, "/flush_cache", None)
            busy = observation.event is EventName.REFUSED and observation.detail.startswith("400")
            if not busy or loop.time() + wait_s >= issued.deadline_s - 1.0:
                return observation
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, POLL_MAX_S)

    async def _release(self, issued: Issued) -> Observation:
        await self._same_process()
        return await self._call(issued, "/release_memory_occupation", _tags(issued.command.tags))

    async def _resume(self, issued: Issued) -> Observation:
        tags = issued.command.tags
        pushed_bytes = self.load.source.manifest.nbytes if self.load else 0
        needed = needed_bytes(tags, self._capabilities, pushed_bytes)
        async with self._rooms.taken(self._gpus, needed, issued.deadline_s) as short:
            if short:
                return Observation(EventName.REFUSED, short)
            await self._same_process()
            return await self._call(issued, "/resume_memory_occupation", _tags(tags))

    async def _begin(self, issued: Issued) -> Observation:
        await self._same_process()
        return await self._call(issued, "/begin_weight_update", b"{}")

    async def _end(self, issued: Issued) -> Observation:
        return await self._call(issued, "/end_weight_update", b"{}")

    async def _push(self, issued: Issued) -> Observation:
        command, load = issued.command, self.load
        if load is None or len(load.chunks) != command.chunks:
            return Observation(EventName.REFUSED, "no weights are loaded for this push")
        observation, settled = await self._push_once(issued, load)
        if settled is None or settled.applied:
            return observation._replace(detail=(settled and settled.note) or observation.detail)
        # Nothing was written, and the source knows now to send everything. The label has moved already, so
        # whatever keeps the weights from following is a failure, and never a refusal that changed nothing.
        why = settled.note
        try:
            observation, settled = await self._push_once(issued, load)
        except Ended as ended:
            observation, settled = ended.observation, None
        done = settled is not None and settled.applied
        detail = f"{settled.note if settled else observation.detail} ({why})"
        if done or observation.event in (EventName.LOST, EventName.DIED):
            return observation._replace(detail=detail)
        return Observation(EventName.FAILED, detail)

    def target(self) -> Target:
        """The server as a weight source sees it, once it is enrolled."""
        on_cpu, unknown = self._capabilities.on_cpu, (None,) * self._capabilities.tp_size
        known = ("",) * self._capabilities.tp_size if on_cpu else self._gpus or unknown
        ranks = tuple(RankPlace(rank, gpu) for rank, gpu in enumerate(known))
        return Target(self._server, ranks, self._capabilities.incarnation)

    async def _push_once(self, issued: Issued, load: Load) -> tuple[Observation, Settled | None]:
        """One offer of one chunk. What it came to is None unless the server said that it took it."""
        command = issued.command
        chunk = load.chunks[command.chunk]
        target = self.target()
        new = labels.label(self._run_id, command.version) if chunk.index + 1 == chunk.count else ""
        making = Making(lambda: offer_and_body(load.source, chunk, target, new))
        try:
            offer, body = await self._aside(making)
        except asyncio.CancelledError:
            making.abandon()
            raise
        except Exception as error:  # noqa: BLE001 - a source is anybody's code, and nothing was sent
            why = f"the weights cannot be made: {error or repr(error)}"
            return Observation(EventName.REFUSED, why), None
        try:
            await self._same_process()
        except BaseException:  # whatever it was, nothing was sent
            await self._aside(offer.withdraw)
            raise
        if new:
            self._labels = (*self._labels[:1], new)
        observation = await self._delivered(issued, offer, body)
        if observation.event is not EventName.PUSHED:
            return observation, None
        if new:
            self._labels = (new,)
        try:
            return observation, await self._aside(offer.settle)
        except Exception as error:  # noqa: BLE001 - a source is anybody's code, and the bytes have moved
            return Observation(EventName.FAILED, f"not settled: {error or repr(error)}"), None

    async def _delivered(self, issued: Issued, offer: Offer, body: bytes) -> Observation:
        """Send an offer. It is taken back unless it was taken, or nobody can say."""
        try:
            observation = await self._call(issued, "/update_weights_from_tensor", body)
        except TransportError as error:
            observation = await self._undelivered(error)
        if observation.event in (EventName.REFUSED, EventName.DIED):  # else it may still read what was lent
            await self._aside(offer.withdraw)
        return observation

    async def _verify(self, issued: Issued) -> Observation:
        try:
            found = await self._label()
        except TimeoutError:
            return Observation(EventName.LOST, "/model_info did not answer")
        try:
            source = self.load and self.load.source
            words, checksum = await proved(self._prover(), issued.command.level, source)
        except TimeoutError:
            return Observation(EventName.LOST, "/server_info did not answer")
        report = Report(version=labels.version_of(found, self._run_id), checksum=checksum)
        said = f"the label read back is {found!r}"
        return Observation(EventName.VERIFIED, f"{said}; {words}" if words else said, report)

    def _prover(self) -> Prover:
        server_info = functools.partial(self._get, *SERVER_INFO)
        return Prover(self._transport, self._aside, server_info, self.target(), self._capabilities.on_cpu)

    async def _continue(self, issued: Issued) -> Observation:
        await self._same_process()
        observation = await self._call(issued, "/continue_generation", b"{}")
        if observation.event is EventName.CONTINUED:
            await mend_readiness(self._transport, self._capabilities)
        return observation
