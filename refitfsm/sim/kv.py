"""The simulated prefix cache: which token prefixes have KV entries, and which weights made them."""

from collections.abc import Iterable
from typing import Final, NamedTuple

MAX_ENTRIES: Final = 128
"""Oldest sequences are evicted beyond this many."""


class KvSpan(NamedTuple):
    """A run of KV entries made by the same weights."""

    weights: str
    """`content_digest` of the weights, or `truth.UNDEFINED`."""
    length: int


class PrefixCache:
    """Sequences of tokens with the spans of their KV entries, oldest first."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, ...], tuple[KvSpan, ...]] = {}
        self.epoch = 0
        """Counts the times it was emptied."""

    def match(self, tokens: tuple[int, ...]) -> tuple[int, tuple[KvSpan, ...]]:
        """The longest cached prefix of `tokens`, shorter than they are, and its spans.

        At least one token is always left: SGLang must compute something to sample from.
        """
        best = 0
        found: tuple[KvSpan, ...] = ()
        for entry, spans in self._entries.items():
            length = _common(entry, tokens, len(tokens) - 1)
            if length > best:
                best, found = length, spans
        return best, _first(found, best)

    def insert(self, tokens: tuple[int, ...], spans: Iterable[KvSpan]) -> None:
        """Remember a sequence. What is cached already keeps the entries it has."""
        if tokens in self._entries:
            return
        if len(self._entries) >= MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        self._entries[tokens] = tuple(spans)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.epoch += 1

    def made_by(self) -> tuple[str, ...]:
        """The weights that made any of the entries, in the order they first appear."""
        return tuple(dict.fromkeys(span.weights for spans in self._entries.values() for span in spans))

    def __len__(self) -> int:
        return len(self._entries)


def _common(entry: tuple[int, ...], tokens: tuple[int, ...], limit: int) -> int:
    limit = min(limit, len(entry))
    if entry[:limit] == tokens[:limit]:
        return limit
    return next(at for at in range(limit) if entry[at] != tokens[at])


def _first(spans: tuple[KvSpan, ...], length: int) -> tuple[KvSpan, ...]:
    """The spans of the first `length` entries."""
    taken: list[KvSpan] = []
    for span in spans:
        if length <= 0:
            break
        taken.append(KvSpan(span.weights, min(span.length, length)))
        length -= span.length
    return tuple(taken)
