"""Proof that a server holds what was pushed: the checksums that it reports, computed here as well."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from refitfsm.weights.offer import Target


class RankSums(NamedTuple):
    """What one rank reports."""

    tp_rank: int
    checksums: Mapping[str, str]
    """By the server's own names."""


class Comparison(NamedTuple):
    """The reported checksums beside those of the pushed weights."""

    differing: tuple[str, ...]
    """The server's tensors that are not what was pushed."""
    unknown: tuple[str, ...]
    """Tensors of which it is not known what they are made from; they were not compared."""
    compared: int
    uncovered: tuple[str, ...] = ()
    """What was pushed and is in no tensor that was compared, by its own names."""

    @property
    def words(self) -> str:
        """In one line."""
        if self.differing:
            return f"{some(self.differing)} differ from what was pushed"
        if not self.compared:
            return f"nothing could be compared: it is not known what {some(self.unknown)} are made from"
        left = f", {some(self.unknown)} not compared" if self.unknown else ""
        return f"{self.compared} tensors have the checksums of what was pushed{left}"


@runtime_checkable
class ProvesContent(Protocol):
    """A weight source that can compute what a server should report."""

    def compare(self, ranks: Sequence[RankSums], target: Target, *, on_cpu: bool) -> Comparison:
        """Compare what the ranks of a server report with the weights as they are now.

        Args:
            on_cpu: the server computes on the CPU, where its checksums are made otherwise.

        Raises:
            WeightsError: these tensors are not on the kind of device that the server's are on.
        """
        ...


def some(names: Sequence[str]) -> str:
    """Names in words, the first few of many."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
