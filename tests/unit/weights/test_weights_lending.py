"""Lent memory is open until it is counted back, or written off."""

import pytest

from refitfsm.weights.errors import WeightsError
from refitfsm.weights.handles import Replica, replica_of, require_places
from refitfsm.weights.lending import Lease, Ledger, lending
from refitfsm.weights.offer import RankPlace, Target

UUID = "0a1b2c3d-0000-1111-2222-333344445555"


class Count:
    """A count that a test sets."""

    def __init__(self) -> None:
        self.back = False
        self.written_off = False

    def is_back(self) -> bool:
        return self.back or self.written_off

    def write_off(self) -> None:
        self.written_off = True


def lease(*counts: Count, server: str = "s", incarnation: str = "") -> Lease:
    return Lease(Target(server, (), incarnation), counts)


def test_a_lease_is_open_until_all_of_it_is_back() -> None:
    """The ledger names the server for as long as one count of its lease is up."""
    one, other = Count(), Count()
    ledger = Ledger()
    ledger.issue(lease(one, other))
    one.back = True
    assert ledger.open == ("s",)
    other.back = True
    assert ledger.open == ()


def test_a_server_that_keeps_memory_is_named() -> None:
    """Waiting for a lease ends in time with the server's name and the remedy; the lease stays open."""
    ledger, held = Ledger(), lease(Count())
    ledger.issue(held)
    with pytest.raises(WeightsError, match=r"^s has answered and still holds memory .*: keep the tensors"):
        ledger.require_back(held, timeout_s=0.01)
    assert ledger.open == ("s",)


def test_what_could_not_be_offered_is_not_lent() -> None:
    """Where an offer cannot be finished, what was lent for it counts as back."""
    count = Count()

    def offer() -> None:
        with lending(Target("s", ())) as held:
            held.add([count])
            raise WeightsError("no room")

    with pytest.raises(WeightsError, match="no room"):
        offer()
    assert count.written_off


def test_only_leases_of_a_process_that_was_replaced_are_written_off() -> None:
    """Another start of a server gives back what the former held; others, and unknown starts, do not."""
    counts = {key: Count() for key in ("former", "same", "other", "unknown")}
    ledger = Ledger()
    ledger.issue(lease(counts["former"], incarnation="1"))
    ledger.issue(lease(counts["same"], incarnation="2"))
    ledger.issue(lease(counts["other"], server="t", incarnation="1"))
    ledger.issue(lease(counts["unknown"]))
    ledger.write_off_earlier(Target("s", (), "2"))
    assert [key for key, count in counts.items() if count.written_off] == ["former"]
    assert ledger.open == ("s", "t", "s")


class Place:
    """Memory that is only somewhere."""

    def __init__(self, place: str) -> None:
        self.place = place


def replicas(*places: str) -> list[Replica]:
    return [Replica(Place(place), {}) for place in places]  # type: ignore[arg-type]


@pytest.mark.parametrize("spelling", [UUID, f"GPU-{UUID}", f"gpu-{UUID.upper()}", f"GPU-{UUID}\n"])
def test_a_rank_gets_what_lies_on_its_gpu(spelling: str) -> None:
    """A UUID is the same with and without its prefix, in either case; host memory serves every rank."""
    given = replicas("other", UUID)
    assert replica_of(given, RankPlace(0, spelling)) is given[1]
    host = replicas("")
    assert replica_of(host, RankPlace(3, spelling)) is host[0]


def test_a_rank_without_tensors_on_its_gpu_is_refused() -> None:
    """The error names the rank, its GPU and where the tensors are, or what has to be named."""
    with pytest.raises(WeightsError, match=r"^rank 1 is on GPU GPU-x, the tensors are on a, b: give"):
        replica_of(replicas("a", "b"), RankPlace(1, "GPU-x"))
    with pytest.raises(WeightsError, match=r"on 2 GPUs and the GPU of rank 0 is not known: name"):
        replica_of(replicas("a", "b"), RankPlace(0, None))
    with pytest.raises(WeightsError, match=r"^rank 0 is on the CPU, the tensors are on a: give CPU tensors"):
        replica_of(replicas("a"), RankPlace(0, ""))
    assert replica_of(host := replicas(""), RankPlace(0, "")) is host[0]


def test_a_server_with_a_rank_elsewhere_is_named() -> None:
    """All ranks of a server are looked at; the error says which server it is."""
    both = Target("http://s", (RankPlace(0, "a"), RankPlace(1, "b")))
    require_places(replicas("a", "b"), both)
    with pytest.raises(WeightsError, match=r"^http://s: rank 1 is on GPU b, the tensors are on a:"):
        require_places(replicas("a"), both)
