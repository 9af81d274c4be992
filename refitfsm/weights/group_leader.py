"""The rank that has the fleet: a weight source whose entries all ranks make together."""

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.gather import Gatherer
from refitfsm.weights.group_ask import Answer, Asker
from refitfsm.weights.group_base import Encode, GroupError, RankGroup
from refitfsm.weights.group_board import Do, Order, first_line
from refitfsm.weights.group_rank import LocalRank, bare
from refitfsm.weights.group_turns import LINGER_S, Turns
from refitfsm.weights.local import encode_here
from refitfsm.weights.manifest import Manifest
from refitfsm.weights.offer import Settled, Target
from refitfsm.weights.plan import ChunkPlan, Planner, PushPlan, PushWish, plan_list


def _lists(manifest: Manifest, wish: PushWish) -> PushPlan:
    return plan_list(manifest, wish.chunk_bytes_max)


class GroupSource:
    """The weights of all ranks, for one refit. Making it begins the refit: the other ranks `follow`.

    It waits until all ranks are there. `timeout_s` is how long a rank may take for what it is asked to do;
    settling included, for which an encoder may allow a server 10 s. `planner` cuts the chunks, which are
    what is gathered at once, and must give what `encode` can encode. `linger_s`: see `group_turns`.

    Leave it as a context manager: with an error, the other ranks hear of it and raise it too.

    Raises:
        WeightsError: this rank is not the leader.
        GroupError: a rank is late, holds other tensors, or is on a GPU where another one is.
    """

    def __init__(
        self,
        group: RankGroup,
        weights: Gatherer,
        encode: Encode = encode_here,
        *,
        timeout_s: float,
        planner: Planner = _lists,
        linger_s: float = LINGER_S,
    ) -> None:
        if group.rank != group.leader:
            raise WeightsError(f"rank {group.rank} is not the leader, {group.leader} is: call follow there")
        self._group = group
        self._weights = weights
        self._planner = planner
        self._everyone = tuple(range(group.size))
        self._local = LocalRank(group.rank, weights, encode)
        self._asker = Asker(group, self._local, timeout_s)
        self._turns = Turns(timeout_s, linger_s)
        self._lock = threading.Lock()
        self._offers = 0
        self._over: WeightsError | None = None
        self._rank_of_gpu = self._join()

    @property
    def manifest(self) -> Manifest:
        """The whole tensors, in the order of the leader's."""
        return self._weights.manifest

    def plan(self, wish: PushWish) -> PushPlan:
        """See `WeightSource.plan`."""
        if self._over is not None:
            raise type(self._over)(str(self._over))
        for target in wish.targets:
            self._places(target)
        return self._planner(self.manifest, wish)

    def offer(self, chunk: ChunkPlan, target: Target) -> "GroupOffer":
        """See `WeightSource.offer`.

        Waits, for `timeout_s` at most, while offers of another chunk are neither settled nor withdrawn: the
        next is gathered when they are back. So leave a thread free to settle them.

        Raises:
            GroupError: a rank failed; the refit is over.
            WeightsError: no rank is on the GPU of one of the server's ranks, or the source is closed.
        """
        places = self._places(target)
        makers = tuple(sorted(set(places)))
        with self._turns.turn(target.server, chunk) as is_whole:
            if not is_whole:
                self._ask(Order(epoch=0, do=Do.READY, ranks=self._everyone), chunk.names)
            self._offers += 1
            number, ranks = self._offers, makers if is_whole else self._everyone
            answers = self._ask(Order(epoch=0, do=Do.MAKE, ranks=ranks, makers=makers, offer=number))
            formats = {answers[rank].report.load_format for rank in makers}
            if len(formats) > 1:
                who, what = ", ".join(map(str, makers)), ", ".join(sorted(map(repr, formats)))
                raise self._fail(f"ranks {who} encode for load formats {what}: give all one encoder")

        def end(do: Do) -> dict[int, Answer]:
            try:
                return self._ask(Order(epoch=0, do=do, ranks=makers, offer=number))
            finally:
                self._turns.returned(target.server, chunk)

        return GroupOffer(target.server, tuple(answers[rank].entry for rank in places), formats.pop(), end)

    def release(self) -> None:
        """See `WeightSource.release`: the chunk that is whole is let go by `close`, which ends the refit."""

    def close(self, version: int | None = None) -> None:
        """End the refit well: each `follow` returns `version`. Offers still open are withdrawn. Idempotent.

        Raises:
            GroupError: a rank does not hear it.
        """
        if self._over is None:
            self._ask(Order(epoch=0, do=Do.DONE, ranks=self._group.others, version=version))
            self._end(WeightsError("the refit of this source is over: make a new one for each refit"))

    def fail(self, reason: str) -> None:
        """End the refit badly: each `follow` raises a `GroupError` that says why. Idempotent."""
        self._fail(self._gave_up(reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.fail(first_line(error))

    def _join(self) -> dict[str, int]:
        """Wait for all ranks; the rank on each GPU, or nothing where the tensors are on the CPU."""
        answers = self._ask(Order(epoch=0, do=Do.JOIN, ranks=self._everyone))
        leader, mine = self._group.leader, answers[self._group.leader].report
        found: dict[str, int] = {}
        for rank, (report, _) in answers.items():
            if report.digest != mine.digest:
                raise self._fail(
                    f"rank {rank} has other tensors than rank {leader}: give all ranks the same names, number"
                    " formats and whole shapes"
                )
            if (report.gpu is None) != (mine.gpu is None):
                where = f"rank {rank} has its tensors on {_at(report.gpu)}, rank {leader} on {_at(mine.gpu)}"
                raise self._fail(f"{where}: give all ranks CPU tensors, or all GPU tensors")
            if report.gpu is not None and found.setdefault(report.gpu, rank) != rank:
                both = f"ranks {found[report.gpu]} and {rank} are both on GPU {report.gpu}"
                raise self._fail(f"{both}: give each rank a GPU of its own")
        return found

    def _places(self, target: Target) -> tuple[int, ...]:
        """The rank that makes the entry for each of a server's ranks."""
        if [place.tp_rank for place in target.ranks] != list(range(len(target.ranks))) or not target.ranks:
            raise WeightsError(f"{target.server}: its ranks are not 0, 1, ... in order: ask it anew")
        if not self._rank_of_gpu:
            return (self._group.leader,) * len(target.ranks)
        places: dict[int, int] = {}
        for tp_rank, uuid in target.ranks:
            rank = self._rank_of_gpu.get(bare(uuid) or "")
            who = f"{target.server}: its rank {tp_rank} is on"
            if uuid is None:
                raise WeightsError(f"{who} a GPU that is not known: name them, ServerSpec(url, gpus=...)")
            if rank is None:
                have = ", ".join(sorted(self._rank_of_gpu))
                where = f"GPU {uuid}" if uuid else "the CPU"
                raise WeightsError(
                    f"{who} {where}, and the trainer's ranks on {have}: push to servers on these GPUs,"
                    " or CPU tensors"
                )
            if rank in places:
                raise WeightsError(f"{who} GPU {uuid}, and so is its rank {places[rank]}: name its GPUs anew")
            places[rank] = tp_rank
        return tuple(places)

    def _ask(self, order: Order, names: tuple[str, ...] = ()) -> dict[int, Answer]:
        with self._lock:
            if self._over is not None:
                raise type(self._over)(str(self._over))
            try:
                return self._asker.ask(order, names)
            except GroupError as error:
                self._tell_failure(str(error))
                raise
            except BaseException as error:
                self._tell_failure(self._gave_up(first_line(error)))
                raise

    def _gave_up(self, reason: str) -> str:
        return f"rank {self._group.leader}, the leader, gave up: {reason}"

    def _fail(self, reason: str) -> GroupError:
        with self._lock:
            if self._over is None:
                self._tell_failure(reason)
        return GroupError(reason)

    def _tell_failure(self, reason: str) -> None:
        with suppress(GroupError):  # then the ranks find out themselves that the store is gone
            self._asker.tell(Order(epoch=0, do=Do.FAILED, reason=reason))
        self._end(GroupError(reason))

    def _end(self, over: WeightsError) -> None:
        self._over = over
        self._asker.close()
        self._local.drop()


class GroupOffer:
    """See `Offer`: the entries that the ranks made for one server. For one thread at a time."""

    def __init__(
        self,
        server: str,
        entries: tuple[bytes, ...],
        load_format: str | None,
        end: Callable[[Do], dict[int, Answer]],
    ) -> None:
        self.entries = entries
        self.load_format = load_format
        self._server = server
        self._end: Callable[[Do], dict[int, Answer]] | None = end

    def settle(self) -> Settled:
        """See `Offer.settle`: all ranks that made an entry settle theirs. Call it once.

        Raises:
            GroupError: one of them failed; the refit is over.
            WeightsError: the push was applied on some of the server's ranks only, or is not open.
        """
        if self._end is None:
            raise WeightsError(f"{self._server}: this offer was settled or withdrawn: make another one")
        end, self._end = self._end, None
        reports = {rank: answer.report for rank, answer in end(Do.SETTLE).items()}
        note = "; ".join(f"rank {rank}: {report.note}" for rank, report in reports.items() if report.note)
        applied = [rank for rank, report in reports.items() if report.applied]
        if applied and len(applied) < len(reports):
            raise WeightsError(
                f"{self._server} applied the entries of ranks {applied} and not those of the others ({note}):"
                " restart it, it holds parts of two versions"
            )
        return Settled(bool(applied), note)

    def withdraw(self) -> None:
        """See `Offer.withdraw`. A group that has failed has withdrawn already."""
        end, self._end = self._end, None
        if end is not None:
            with suppress(WeightsError):
                end(Do.WITHDRAW)


def _at(gpu: str | None) -> str:
    return "the CPU" if gpu is None else f"GPU {gpu}"
