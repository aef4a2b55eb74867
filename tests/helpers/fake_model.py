"""A language model without a network whose logits show every violation of the protocol.

Its row is a hash of the text that a token attends to, computed alike by jnp from the cache and by
numpy from the text, so the two can be compared bit for bit. Where a caller violates the protocol,
rows are NaN or those of another text:

- a token attends to a slot that was never written or that `keep` left undefined: NaN;
- the positions attended to are not 0, 1, .. up to its own, each once: NaN (a sibling, a stale slot,
  a gap);
- it does not attend to its own slot, or its position is out of range: NaN;
- a block holds an id outside the vocabulary, on padding too (a network may turn it into NaN, which
  no mask hides), or reaches beyond the cache: NaN from then on;
- `keep` gets an invalid path: NaN from then on;
- with `rolls_back=False`, a block does not directly follow the one before: NaN from then on;
- with `takes_trees=False`, mask and positions are ignored: a tree gets the rows of a span of text.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import struct
from jaxspec.models import Block, LanguageModel
from jaxspec.models.network import Tokenizer

NOTHING = -1
"""The content of a slot that no token may attend to."""

UNIT = 2.0**-14
"""Logits are multiples of this, so float32 arithmetic on them is exact."""


@struct
class FakeCache:
    """What was written.

    Attributes:
      tokens: int32 [S].
      positions: int32 [S].
      end: int32 [], the slot after the last block.
      is_broken: bool [], whether the protocol was violated with lasting effect.
    """

    tokens: jax.Array
    positions: jax.Array
    end: jax.Array
    is_broken: jax.Array


def fake_model(
    vocab: int = 5,
    *,
    name: str = "fake",
    takes_trees: bool = True,
    rolls_back: bool = True,
    has_keep: bool = True,
    max_context: int | None = None,
    noise: float = 0.0,
    tokenizer: Tokenizer | None = None,
) -> LanguageModel:
    """Make a fake.

    Args:
      vocab: V.
      name: its id.
      takes_trees: whether it honours mask and positions.
      rolls_back: whether slots may be overwritten.
      has_keep: whether its slots can be moved.
      max_context: tokens at this position and after it get no row.
      noise: a multiple of 1/16, at most 1: how far its rows are from those of `noise=0`. A noisy
        fake is a draft that agrees with the plain one some of the time.
      tokenizer: the tokenizer.
    """
    return LanguageModel(
        name=name,
        vocab=vocab,
        params={"noise": jnp.float32(noise)},
        forward=_forward_of(vocab, takes_trees, rolls_back, max_context),
        init_cache=_init_cache,
        keep=_keep if has_keep else None,
        takes_trees=takes_trees,
        rolls_back=rolls_back,
        max_context=max_context,
        tokenizer=tokenizer,
    )


def row_after(context: Sequence[int], vocab: int = 5, *, noise: float = 0.0) -> np.ndarray:
    """Return the logits float32 [V] of a fake after a text, from the text alone."""
    tokens = np.asarray(context, np.uint32)
    text = _place(np.arange(len(tokens), dtype=np.uint32), tokens).sum(dtype=np.uint32)
    return np.asarray(_logits(text[None], vocab, np.float32(noise)))[0]


@functools.cache
def _forward_of(vocab: int, takes_trees: bool, rolls_back: bool, max_context: int | None) -> Any:
    """Make one function for all fakes of one kind, so that they share compiled programs."""
    return functools.partial(
        _forward,
        vocab,
        takes_trees=takes_trees,
        rolls_back=rolls_back,
        max_context=max_context,
    )


def _forward(
    vocab: int,
    params: Any,
    cache: FakeCache,
    block: Block,
    *,
    takes_trees: bool,
    rolls_back: bool,
    max_context: int | None,
) -> tuple[jax.Array, FakeCache]:
    tokens, positions, mask, at = block.tokens, block.positions, block.mask, block.first
    length, slots = mask.shape
    own = at + jnp.arange(length, dtype=jnp.int32)
    places = jnp.arange(slots, dtype=jnp.int32)
    if not takes_trees:
        positions = own
        mask = places[None] <= own[:, None]
    is_broken = cache.is_broken | (at < 0) | (at > slots - length)
    if not rolls_back:
        is_broken |= at != cache.end
    is_broken |= jnp.any((tokens < 0) | (tokens >= vocab))
    is_place = (positions >= 0) & (positions < (slots if max_context is None else max_context))
    tokens = jnp.where(is_place, tokens, NOTHING)
    cache = FakeCache(
        tokens=lax.dynamic_update_slice(cache.tokens, tokens, (at,)),
        positions=lax.dynamic_update_slice(cache.positions, positions, (at,)),
        end=at + length,
        is_broken=is_broken,
    )
    text = _sum_seen(mask, _place(cache.positions.astype(jnp.uint32), cache.tokens))
    # Each position once: as many slots as positions, with the sum of hashes that these would have.
    ladder = _mix(places.astype(jnp.uint32))
    upto = jnp.cumsum(ladder, dtype=jnp.uint32)[jnp.clip(positions, 0, slots - 1)]
    is_text = _sum_seen(mask, _mix(cache.positions.astype(jnp.uint32))) == upto
    is_text &= jnp.sum(mask, axis=1, dtype=jnp.int32) == positions + 1
    is_text &= ~jnp.any(mask & (cache.tokens == NOTHING)[None], axis=1)
    is_text &= jnp.any(mask & (places[None] == own[:, None]), axis=1)
    logits = _logits(text, vocab, params["noise"])
    return jnp.where((is_text & ~is_broken)[:, None], logits, jnp.nan), cache


def _init_cache(slots: int) -> FakeCache:
    nothing = jnp.full(slots, NOTHING, jnp.int32)
    return FakeCache(
        tokens=nothing,
        positions=nothing,  # one array twice, as a network may have it
        end=jnp.int32(0),
        is_broken=jnp.bool_(False),
    )


def _keep(cache: FakeCache, at: jax.Array, path: jax.Array) -> FakeCache:
    slots = cache.tokens.shape[0]
    steps = jnp.arange(path.shape[0], dtype=jnp.int32)
    is_kept = path >= 0
    rises = (path[1:] > path[:-1]) & is_kept[:-1]
    is_path = jnp.all(~is_kept | (path >= steps)) & jnp.all(~is_kept[1:] | rises)
    is_path &= (at >= 0) & jnp.all(at + path < slots) & (at <= slots - path.shape[0])
    sources = jnp.clip(at + path, 0, slots - 1)
    kept = jnp.where(is_kept, cache.tokens[sources], NOTHING)
    return FakeCache(
        tokens=lax.dynamic_update_slice(cache.tokens, kept, (at,)),
        positions=lax.dynamic_update_slice(cache.positions, cache.positions[sources], (at,)),
        end=cache.end,
        is_broken=cache.is_broken | ~is_path,
    )


def _sum_seen(mask: jax.Array, hashes: jax.Array) -> jax.Array:
    """Add up the hashes of the slots that each token attends to, uint32 [L]."""
    return jnp.sum(jnp.where(mask, hashes[None], jnp.uint32(0)), axis=1, dtype=jnp.uint32)


def _place(positions: Any, tokens: Any) -> Any:
    """Hash tokens at positions: a text is the sum of these."""
    return _mix(positions * np.uint32(2654435761) + tokens.astype(np.uint32) + np.uint32(1))


def _logits(text: Any, vocab: int, noise: Any) -> Any:
    """Turn hashes [L] of texts into logits [L, V], from 0 to less than 4 + 4 noise."""
    tokens = np.arange(vocab, dtype=np.uint32) * np.uint32(40503)

    def units(hashes: Any) -> Any:
        return ((hashes >> np.uint32(8)) & np.uint32(0xFFFF)).astype(np.float32) * np.float32(UNIT)

    plain = _mix(_mix(text)[:, None] + _mix(tokens)[None])
    return units(plain) + noise * units(_mix(plain + np.uint32(77)))


def _mix(x: Any) -> Any:
    """Mix 32 bits, one to one (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
