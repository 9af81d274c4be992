"""The simulator's building blocks: profiles, ledger, contents, cache and tokens."""

import struct

import pytest

from refitfsm.sim.content import TensorSpec, cast, digest_of, spec_of, tiny_model, tiny_tensors
from refitfsm.sim.kv import MAX_ENTRIES, KvSpan, PrefixCache
from refitfsm.sim.ledger import GpuLedger, LedgerError
from refitfsm.sim.profiles import Band, profile_for
from refitfsm.sim.tokens import begin, expected, seed_of, step
from refitfsm.sim.weights import LoadError, WeightStore, runtime_layout


@pytest.mark.parametrize(
    ("version", "band"),
    [
        ("0.5.10", Band.B4),
        ("0.5.12.post1", Band.B4),
        ("0.5.16", Band.B4),
        ("0.5.20", Band.B4),
        ("0.5.21", Band.B5),
        ("0.5.22", Band.B6),
        ("0.5.23", Band.B6),
    ],
)
def test_a_release_belongs_to_its_band(version: str, band: Band) -> None:
    """The bands begin and end at the releases the protocol says."""
    assert profile_for(version).band is band


@pytest.mark.parametrize("version", ["0.5.9", "0.5.24", "0.6.0", "", "latest", "0.5.16rc1", "0.5"])
def test_an_unknown_release_is_refused(version: str) -> None:
    """A release that is not simulated is an error that names the range of those that are."""
    with pytest.raises(ValueError, match=r"0\.5\.10 to 0\.5\.23"):
        profile_for(version)


@pytest.mark.parametrize(
    ("field", "first"),
    [
        ("sessions_required", 21),
        ("waiting_ignored_while_paused", 21),
        ("has_ready", 20),
        ("has_checksum", 12),
        ("checker_takes_get", 13),
        ("version_spans", 19),
        ("generate_schema_gate", 22),
        ("identity_in_model_info", 18),
    ],
)
def test_a_feature_begins_at_its_release(field: str, first: int) -> None:
    """Each feature is off before its first release and on from it."""
    have = [getattr(profile_for(f"0.5.{number}"), field) for number in range(10, 24)]
    assert have == [number >= first for number in range(10, 24)]


def test_a_gpu_is_never_overfull() -> None:
    """A take beyond the capacity is refused and changes nothing."""
    ledger = GpuLedger({"a": 10})
    assert ledger.take("a", "one", 6)
    assert not ledger.take("a", "two", 5)
    assert (ledger.used("a"), ledger.free("a"), ledger.holders("a")) == (6, 4, {"one": 6})
    assert ledger.give_back("a", "one") == 6
    assert ledger.take("a", "two", 10)


def test_bytes_are_held_once() -> None:
    """The same holder cannot take twice, and giving back what it has not frees nothing."""
    ledger = GpuLedger()
    assert ledger.take("any", "one", 1 << 50)
    with pytest.raises(LedgerError, match="already holds"):
        ledger.take("any", "one", 1)
    assert ledger.give_back("any", "two") == 0
    assert ledger.free("any") is None


def test_the_tiny_model_is_a_function_of_its_seed() -> None:
    """The same seed is the same weights, another seed other ones, of the same shapes."""
    assert digest_of(tiny_model(0)) == "d310ec0a54a796a7"
    assert digest_of(tiny_model(1)) != digest_of(tiny_model(0))
    assert {name: spec.shape for name, spec in tiny_model(1).items()} == {
        name: spec.shape for name, spec in tiny_model(0).items()
    }
    assert set(tiny_tensors(0)) == set(tiny_model(0))


def test_the_digest_of_weights_ignores_their_order() -> None:
    """A model sent in another order is the same model."""
    model = tiny_model(0)
    assert digest_of(dict(reversed(model.items()))) == digest_of(model)


def test_bytes_must_fit_the_shape() -> None:
    """A tensor whose bytes do not fit its dtype and shape is refused."""
    with pytest.raises(ValueError, match="24 bytes, got 20"):
        spec_of("F32", (2, 3), bytes(20))


@pytest.mark.parametrize(("dtype", "nan"), [("F32", struct.pack("<f", float("nan"))), ("BF16", b"\xc0\x7f")])
def test_a_nan_is_seen(dtype: str, nan: bytes) -> None:
    """A tensor that begins with a NaN is poisoned; zeros and infinities are not."""
    assert spec_of(dtype, (2,), nan + bytes(len(nan))).poisoned
    assert not spec_of(dtype, (1,), bytes(len(nan))).poisoned
    infinity = struct.pack("<f", float("inf"))[-len(nan) :]
    assert not spec_of(dtype, (1,), infinity).poisoned


def test_a_cast_is_another_content() -> None:
    """Bytes loaded into another dtype are neither the old content nor by chance another one."""
    spec = spec_of("F32", (2,), bytes(8))
    assert cast(spec, "F32") is spec
    assert cast(spec, "BF16").digest not in {spec.digest, cast(spec, "F16").digest}


def test_projections_share_a_runtime_parameter() -> None:
    """Query, key and value live in one parameter, in that order, whatever order they are listed in."""
    layout = runtime_layout(("l.v_proj.weight", "l.k_proj.weight", "l.q_proj.weight", "l.o_proj.weight"))
    assert layout == {
        "l.qkv_proj.weight": ("l.q_proj.weight", "l.k_proj.weight", "l.v_proj.weight"),
        "l.o_proj.weight": ("l.o_proj.weight",),
    }


def test_weights_say_what_is_missing_torn_or_strange() -> None:
    """Undefined weights have no digest; ranks that differ, or a mixed set, have one nobody published."""
    store = WeightStore(tiny_model(0), ranks=2)
    assert store.digest() == digest_of(tiny_model(0))
    name, spec = next(iter(tiny_model(1).items()))
    store.load(0, name, spec)
    torn = store.digest()
    store.load(1, name, spec)
    mixed = store.digest()
    assert len({torn, mixed, digest_of(tiny_model(0)), digest_of(tiny_model(1))}) == 4
    store.replace(tiny_model(1))
    assert store.digest() == digest_of(tiny_model(1))
    store.lose()
    assert store.digest() is None
    assert not store.load(0, "nope", spec)
    with pytest.raises(LoadError, match="Attempted to load weight"):
        store.load(0, name, TensorSpec("F32", (1,), "0" * 16))


def test_the_longest_prefix_is_reused_but_never_all() -> None:
    """At least the last token is computed, and the spans of the reused ones come along."""
    cache = PrefixCache()
    cache.insert((1, 2, 3, 4), [KvSpan("a", 2), KvSpan("b", 2)])
    assert cache.match((1, 2, 3, 4)) == (3, (KvSpan("a", 2), KvSpan("b", 1)))
    assert cache.match((1, 9)) == (1, (KvSpan("a", 1),))
    assert cache.match((1,)) == (0, ())
    assert cache.match((7, 8)) == (0, ())
    assert cache.made_by() == ("a", "b")


def test_the_cache_keeps_what_it_has_until_it_is_cleared() -> None:
    """An entry is not overwritten by newer weights; a clear empties it and counts."""
    cache = PrefixCache()
    cache.insert((1, 2), [KvSpan("old", 2)])
    cache.insert((1, 2), [KvSpan("new", 2)])
    assert cache.match((1, 2, 3))[1] == (KvSpan("old", 2),)
    cache.clear()
    assert (len(cache), cache.epoch) == (0, 1)


def test_the_cache_is_bounded() -> None:
    """The oldest sequences make room."""
    cache = PrefixCache()
    for number in range(MAX_ENTRIES + 5):
        cache.insert((number, 0), [KvSpan("w", 2)])
    assert len(cache) == MAX_ENTRIES
    assert cache.match((0, 0)) == (0, ())


def test_tokens_depend_on_weights_cache_and_prompt() -> None:
    """Another digest, another prompt or a foreign cache gives other tokens; nothing else does."""
    clean = expected("w", (1, 2), 8, 512)
    assert clean == expected("w", (1, 2), 8, 512)
    assert clean != expected("v", (1, 2), 8, 512)
    assert clean != expected("w", (1, 3), 8, 512)
    context = begin((1, 2))
    assert step(context, seed_of("w", ("v",)), 512) != step(context, seed_of("w", ()), 512)
    assert step(context, None, 512)[0] == 0
