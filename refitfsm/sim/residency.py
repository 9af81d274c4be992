"""Which parts of a simulated server's GPU memory are really there, and the server's own list of them.

The two are not the same thing: without the memory saver nothing is ever given back, but the list is
kept all the same, and a resume of what is not on it kills.
"""

from collections.abc import Sequence
from typing import Final

from refitfsm.model.states import ALL_TAGS, Tag
from refitfsm.sim.config import SimConfig
from refitfsm.sim.ledger import GpuLedger

FIXED: Final = "fixed"
"""The holder of what is never released."""
RELEASE_ORDER: Final = (Tag.KV_CACHE, Tag.WEIGHTS, Tag.CUDA_GRAPH)
RESUME_ORDER: Final = (Tag.CUDA_GRAPH, Tag.WEIGHTS, Tag.KV_CACHE)


class Fatal(Exception):
    """The server's scheduler does not survive this."""

    def __init__(self, cause: str, *, exits: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.exits = exits
        """The process ends inside a C library instead of raising; noticed a little later."""


class Residency:
    """GPU bytes of one server, by tag, on all its ranks' GPUs."""

    def __init__(self, name: str, config: SimConfig, ledger: GpuLedger) -> None:
        self.gpus = config.gpus or tuple(f"{name}/gpu{rank}" for rank in range(config.tp_size))
        self.listed: set[str] = set()
        """Tags on the server's own list of released ones; any string may be on it."""
        self.released: set[Tag] = set()
        """Tags whose memory is really given back; stays empty with the no-op saver."""
        self._name = name
        self._saver = config.memory_saver
        self._graphs_too = config.cuda_graph_in_saver
        self._ledger = ledger
        self._sizes: dict[str, int] = {
            FIXED: config.fixed_bytes,
            Tag.WEIGHTS: config.rank_weights_bytes(),
            Tag.KV_CACHE: config.kv_cache_bytes,
            Tag.CUDA_GRAPH: config.cuda_graph_bytes,
        }

    @property
    def resident(self) -> frozenset[Tag]:
        """Tags whose memory is there, given that the process is."""
        return ALL_TAGS - self.released

    def take_all(self) -> bool:
        """Hold everything, as at a start; False, and nothing changes, where a GPU has no room."""
        self.listed.clear()
        self.released.clear()
        for part in self._sizes:
            if not self._take(part):
                self.give_all()
                return False
        return True

    def give_all(self) -> None:
        """Hold nothing: the process is gone."""
        for part in self._sizes:
            self._give(part)

    def unlist(self, tags: Sequence[str]) -> None:
        """Take tags off the list, in order.

        Raises:
            Fatal: one is not on it.
        """
        for tag in tags:
            if tag not in self.listed:
                raise Fatal(f"KeyError: '{tag}'")
            self.listed.remove(tag)

    def unmap(self, tag: Tag) -> bool:
        """Give a tag's memory back; False where the saver does not act on it.

        Raises:
            Fatal: it is given back already.
        """
        if not self._acts_on(tag):
            return False
        if tag in self.released:
            raise Fatal(f"Cannot pause allocation that is not active: {tag}", exits=True)
        self.released.add(tag)
        self._give(tag)
        return True

    def remap(self, tag: Tag) -> None:
        """Take a tag's memory again, where the saver acts on it.

        Raises:
            Fatal: a GPU has no room.
        """
        if self._acts_on(tag):
            if not self._take(tag):
                raise Fatal("CUresult error: 2 (out of memory)", exits=True)
            self.released.discard(tag)

    def _acts_on(self, tag: Tag) -> bool:
        return self._saver and (tag != Tag.CUDA_GRAPH or self._graphs_too)

    def _take(self, part: str) -> bool:
        holder = f"{self._name}/{part}"
        for at, gpu in enumerate(self.gpus):
            if not self._ledger.take(gpu, holder, self._sizes[part]):
                for taken in self.gpus[:at]:
                    self._ledger.give_back(taken, holder)
                return False
        return True

    def _give(self, part: str) -> None:
        for gpu in self.gpus:
            self._ledger.give_back(gpu, f"{self._name}/{part}")
