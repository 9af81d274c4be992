"""Which server is served next: threads that ask, in an order that only the rules decide."""

import threading
from collections.abc import Callable

import pytest

from refitfsm.weights.group_turns import Turns
from refitfsm.weights.plan import ChunkPlan

CHUNKS = [ChunkPlan(index, 3, (f"tensor {index}",), 4) for index in range(3)]
PATIENT_S, SHORT_S = 30.0, 0.2


def served(turns: Turns, server: str, index: int) -> bool:
    """Make an offer; whether its chunk was whole already."""
    with turns.turn(server, CHUNKS[index]) as is_whole:
        return is_whole


def settled(turns: Turns, server: str, index: int) -> bool:
    """Make an offer and settle it."""
    is_whole = served(turns, server, index)
    turns.returned(server, CHUNKS[index])
    return is_whole


class Later:
    """Work in another thread, noted when it is through."""

    def __init__(self, log: list[str], name: str, work: Callable[[], object]) -> None:
        def do() -> None:
            work()
            log.append(name)

        self._thread = threading.Thread(target=do)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(PATIENT_S)
        assert not self._thread.is_alive()


def test_a_whole_chunk_is_gathered_once() -> None:
    """Each server that asks for the chunk that is whole gets it, however many have it; others do not."""
    turns = Turns(PATIENT_S)
    assert [served(turns, server, 0) for server in "abc"] == [False, True, True]
    for server in "abc":
        turns.returned(server, CHUNKS[0])
    assert [settled(turns, server, 1) for server in "abc"] == [False, True, True]
    assert settled(turns, "a", 0) is False


def test_a_chunk_that_could_not_be_made_is_not_whole() -> None:
    """After an offer that failed, the chunk is gathered anew, and nothing is lent."""
    turns = Turns(PATIENT_S)
    with pytest.raises(RuntimeError), turns.turn("a", CHUNKS[0]):
        raise RuntimeError
    assert settled(turns, "b", 1) is False
    assert settled(turns, "b", 0) is False


def test_the_next_chunk_waits_for_what_is_lent() -> None:
    """A chunk is not gathered while another server has an open offer of the one before."""
    turns, log = Turns(PATIENT_S), list[str]()
    settled(turns, "a", 0)
    served(turns, "b", 0)
    ahead = Later(log, "next", lambda: settled(turns, "a", 1))
    log.append("returned")
    turns.returned("b", CHUNKS[0])
    ahead.join()
    assert log == ["returned", "next"]


def test_a_server_that_hangs_does_not_stop_the_others() -> None:
    """An offer that never comes back is waited for until the deadline, and may still come back later."""
    turns = Turns(SHORT_S, linger_s=0.0)
    served(turns, "hangs", 0)
    for index in (1, 2):
        assert settled(turns, "a", index) is False
    turns.returned("hangs", CHUNKS[0])
    assert settled(turns, "hangs", 2) is True


def test_a_server_does_not_wait_for_its_own_last_offer() -> None:
    """A server whose last push ended unknown can be offered the first chunk again."""
    turns = Turns(PATIENT_S)
    served(turns, "a", 0)
    served(turns, "a", 1)
    assert settled(turns, "a", 0) is False


def test_a_server_that_keeps_pace_is_waited_for() -> None:
    """A server two chunks ahead of another lets it catch up, so that both share what is gathered next."""
    turns, log = Turns(PATIENT_S, linger_s=PATIENT_S), list[str]()
    for server in "ab":
        settled(turns, server, 0)
    settled(turns, "a", 1)
    ahead = Later(log, "a 2", lambda: settled(turns, "a", 2))
    assert served(turns, "b", 1) is True
    log.append("b 1")
    turns.returned("b", CHUNKS[1])
    ahead.join()
    assert log == ["b 1", "a 2"]
    assert settled(turns, "b", 2) is True


def test_a_server_that_left_is_not_waited_for_long() -> None:
    """A server that asks for nothing any more holds up the others no longer than it is waited for."""
    turns = Turns(PATIENT_S, linger_s=0.05)
    for server in "ab":
        settled(turns, server, 0)
    for index in (1, 2):
        settled(turns, "a", index)
