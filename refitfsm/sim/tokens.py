"""The simulated model: the next token as a pure function of weights, KV and the tokens so far.

The same weights and the same prompt give the same tokens on every simulated server, as greedy
decoding does. A cache that other weights made changes them. Undefined weights give one token for
ever, as the real ones were seen to do.
"""

import hashlib
from typing import Final

GARBAGE_TOKEN: Final = 0


def begin(prompt: tuple[int, ...]) -> bytes:
    """The context of a request before its first token: 8 bytes."""
    packed = b"".join([token.to_bytes(4, "little") for token in prompt])
    return hashlib.blake2b(packed, digest_size=8).digest()


def seed_of(weights: str, foreign_kv: tuple[str, ...]) -> bytes:
    """What a forward pass depends on beside the context.

    `foreign_kv` are the digests of other weights whose KV entries are attended to; none in a clean pass.
    """
    return hashlib.blake2b("|".join((weights, *foreign_kv)).encode(), digest_size=8).digest()


def step(context: bytes, seed: bytes | None, vocab_size: int) -> tuple[int, bytes]:
    """One token and the context after it; without a seed the weights are undefined."""
    if seed is None:
        token = GARBAGE_TOKEN
    else:
        token = int.from_bytes(hashlib.blake2b(context + seed, digest_size=4).digest(), "little") % vocab_size
    return token, hashlib.blake2b(context + token.to_bytes(4, "little"), digest_size=8).digest()


def expected(weights: str, prompt: tuple[int, ...], count: int, vocab_size: int) -> tuple[int, ...]:
    """The `count` tokens that the weights with this digest answer to `prompt` from a clean cache."""
    context = begin(prompt)
    seed = seed_of(weights, ())
    tokens = []
    for _ in range(count):
        token, context = step(context, seed, vocab_size)
        tokens.append(token)
    return tuple(tokens)
