"""Payloads: what torch writes is read without torch, and nothing else gets through."""

import base64
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from refitfsm.sim.allowlist import EXACT
from refitfsm.sim.content import spec_of, tiny_model
from refitfsm.sim.payload import Lru, decode_entry, is_base64
from refitfsm.sim.tensors import Storage, Undecodable, strided
from refitfsm.sim.unpickle import Blocked, load_payload, load_storage

from .pickles import PAYLOADS

_FILE = Path(__file__).parents[2] / "data" / "payloads" / "torch-2.13.json"
_CASES: list[dict[str, Any]] = json.loads(_FILE.read_text())["cases"]


@pytest.mark.parametrize("exact", [True, False], ids=["0.5.21 and later", "before 0.5.21"])
@pytest.mark.parametrize("case", _CASES, ids=lambda each: each["case"])
def test_reads_what_torch_writes(case: dict[str, Any], exact: bool) -> None:
    """Each pickle of torch's gives the tensors that were put in, or dies of what the real load dies of."""
    error = case.get("error")
    if not exact:
        error = case.get("error_before_0.5.21", error)
    if error is not None:
        with pytest.raises(Undecodable, match=error or "."):
            decode_entry(case["entry"], load_format=case["load_format"], exact=exact, rank=0)
        return
    found = decode_entry(case["entry"], load_format=case["load_format"], exact=exact, rank=0)
    wanted = [
        (name, spec_of(dtype, tuple(shape), bytes.fromhex(data)))
        for name, dtype, shape, data in case["tensors"]
    ]
    assert list(found) == wanted


def test_a_rank_reads_its_own_pickle() -> None:
    """A tensor given as one pickle a rank is read from the rank's own, and a rank too many dies."""
    entry = next(case["entry"] for case in _CASES if case["case"] == "one pickle for each rank")
    zero, one = (decode_entry(entry, load_format=None, exact=True, rank=rank) for rank in (0, 1))
    assert zero != one
    with pytest.raises(Undecodable, match="IndexError"):
        decode_entry(entry, load_format=None, exact=True, rank=2)


def test_the_tests_own_pickles_are_torchs() -> None:
    """The payloads that the scenarios send hold the tiny model, as a list and as a bucket."""
    whole = decode_entry(PAYLOADS["$seed1"], load_format=None, exact=True, rank=0)
    assert dict(whole) == tiny_model(1)
    bucket = decode_entry(PAYLOADS["$bucket of seed1"], load_format="flattened_bucket", exact=True, rank=0)
    assert dict(bucket) == tiny_model(1)


class _Calls:
    """Pickles to a call of any global."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("function", [print, eval, open, getattr, __import__, Path, re.compile, pickle.loads])
@pytest.mark.parametrize("exact", [True, False])
def test_nothing_that_runs_gets_through(function: object, exact: bool) -> None:
    """A pickle that names something to run is refused and nothing of it runs, under either rule."""
    data = pickle.dumps([("w", _Calls(function, "1"))])
    with pytest.raises(Undecodable):
        load_payload(data, exact=exact)


def test_an_allowed_name_is_not_resolved_for_real() -> None:
    """Even a global on SGLang's list is a local stand-in here, or not known: nothing is imported."""
    for module, name in sorted(EXACT):
        data = f"c{module}\n{name}\n.".encode()
        try:
            found = load_payload(data, exact=True)
        except Undecodable:
            continue
        home = getattr(found, "__module__", "builtins")
        assert home.startswith("refitfsm.sim") or found in {dict, list, tuple} or module == "collections"


def test_a_storage_holds_only_a_storage() -> None:
    """The pickles inside a storage may name storage types and nothing else, not even what a payload may."""
    with pytest.raises(Blocked, match="OrderedDict"):
        load_storage(b"ccollections\nOrderedDict\n.")
    with pytest.raises(Undecodable):
        load_storage(b"")
    with pytest.raises(Undecodable):
        load_storage("text")


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "error"),
    [
        (0, (3,), (1,), "out of bounds"),
        (2, (1,), (1,), "out of bounds"),
        (0, (1 << 40,), (1,), "out of bounds"),
        (0, (2,), (1, 1), "mismatch"),
        (-1, (1,), (1,), "whole numbers"),
        (0, (True,), (1,), "whole numbers"),
        (0, "2", (1,), "whole numbers"),
        (0, (1 << 30, 1 << 30), (0, 0), "too large"),
    ],
)
def test_a_tensor_stays_in_its_storage(offset: object, shape: object, stride: object, error: str) -> None:
    """Sizes and strides beyond the storage, or not numbers, or absurd, are refused before any copy."""
    with pytest.raises(Undecodable, match=error or "."):
        strided(Storage("F32", bytes(8)), offset, shape, stride)


def test_base64_is_checked_strictly() -> None:
    """Characters outside the alphabet and wrong padding are not base64."""
    assert is_base64(base64.b64encode(b"abc").decode())
    assert not is_base64("not base64!")
    assert not is_base64("abc")


def test_base64_twice_is_taken_off_twice() -> None:
    """An entry whose base64 is base64 again is unwrapped once more, as SGLang does."""
    twice = base64.b64encode(PAYLOADS["$seed1"].encode()).decode()
    assert dict(decode_entry(twice, load_format=None, exact=True, rank=0)) == tiny_model(1)


def test_the_memory_of_results_is_bounded() -> None:
    """The least recently used results go first, and one that is too heavy is not kept at all."""
    kept: Lru[str, int] = Lru(entries=2, weight=10)
    kept.put("a", 1, 1)
    kept.put("b", 2, 1)
    assert kept.get("a") == 1
    kept.put("c", 3, 1)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)
    kept.put("heavy", 4, 11)
    assert kept.get("heavy") is None
    kept.put("d", 4, 10)
    assert (kept.get("a"), kept.get("c"), kept.get("d")) == (None, None, 4)
