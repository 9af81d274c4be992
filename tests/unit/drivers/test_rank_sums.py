"""Each rank's checksums, in both shapes that SGLang gives them."""

from refitfsm.drivers.answers import rank_sums
from refitfsm.weights.proof import Comparison, RankSums


def test_both_shapes_are_read() -> None:
    """A place is an object in older versions, and a list of one for each model in newer ones."""
    old = {"checksums": {"a": "1"}, "parallelism_info": {"tp_rank": 1, "tp_size": 2}}
    new = {"checksums": {"a": "2"}, "parallelism_info": [{"role": "target", "tp_rank": 0}]}
    assert rank_sums({"ranks": [old, new]}) == (RankSums(1, {"a": "1"}), RankSums(0, {"a": "2"}))


def test_anything_else_is_nothing() -> None:
    """An answer that has no checksums gives none, and no error."""
    for fields in ({}, {"ranks": None}, {"ranks": [1, {}, {"checksums": 1, "parallelism_info": []}]}):
        assert rank_sums(fields) == ()


def test_a_comparison_in_words() -> None:
    """It names what differs first, then what was left out, a few of many."""
    names = tuple("abcde")
    assert Comparison(names, (), 9).words == "a, b, c and 2 more differ from what was pushed"
    assert Comparison((), names[:1], 0).words.endswith("what a are made from")
    assert "9 tensors have the checksums" in Comparison((), names, 9).words
    assert Comparison((), names, 9).words.endswith("a, b, c and 2 more not compared")
