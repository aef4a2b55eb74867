"""Sets of tokens as bits, 32 to a word: the layout of xgrammar, vLLM and sglang."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

WORD = 32


def words_of(vocab: int) -> int:
    """Return how many words hold a set of tokens."""
    return -(-vocab // WORD)


def token_bits(is_in: jax.Array) -> jax.Array:
    """Return sets of tokens as bits (traced): token t is bit t mod 32 of word t // 32.

    Args:
      is_in: bool [..., V].

    Returns:
      uint32 [..., ceil(V / 32)].

    >>> token_bits(jnp.array([True, False, True])).tolist()
    [5]
    """
    pad = -is_in.shape[-1] % WORD
    padded = jnp.pad(is_in, [(0, 0)] * (is_in.ndim - 1) + [(0, pad)])
    grouped = padded.reshape(*padded.shape[:-1], -1, WORD).astype(jnp.uint32)
    places = jnp.arange(WORD, dtype=jnp.uint32).reshape([1] * (grouped.ndim - 1) + [WORD])
    return jnp.sum(grouped << places, axis=-1, dtype=jnp.uint32)


def read_bits(words: jax.Array, row: jax.Array, start: Any, size: int) -> jax.Array:
    """Return for consecutive tokens whether they are in the set of a row, bool [size]."""
    start = jnp.asarray(start, jnp.int32)
    count = min(size // WORD + 2, words.shape[1])
    # A stretch at the end of the words is not where it was asked for.
    first = jnp.clip(start // WORD, 0, words.shape[1] - count)
    where = (jnp.asarray(row, jnp.int32), first)
    part = lax.dynamic_slice(words, where, (1, count))[0].astype(jnp.uint32)
    all_bits = (part[:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None]) & 1
    return lax.dynamic_slice(all_bits.reshape(-1), (start - first * WORD,), (size,)) != 0


def bits_at(words: jax.Array, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return whether tokens [...] are in the sets of rows [...], bool [...]."""
    word = words[rows, tokens // WORD].astype(jnp.uint32)
    return (word >> (tokens % WORD).astype(jnp.uint32)) & 1 != 0
