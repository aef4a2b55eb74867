"""The vocabulary in tiles: sums over a row by tile, and the draw of a token from them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import assert_array
from jaxspec.loops import fori_loop, zeros_like_result

TILE = 512
"""Vocabulary entries in a tile. A draw first selects a tile, then a token inside it."""

SPAN = 32
"""Most tiles that are summed at a time on CPU, so that a span of two rows fits into the cache."""

LEAST = float(np.finfo(np.float32).tiny)
"""The least normal float32. Smaller weights count as 0, since devices differ in whether they keep
them; smaller temperatures are 0."""

Piece: TypeAlias = Callable[[Any, int, jax.Array | None], tuple[jax.Array, ...]]
"""Maps (start, size, tokens or None) to float32 [size] quantities of the tokens start .. start +
size - 1."""


def weights_of(entries: jax.Array) -> jax.Array:
    """Return stored entries [...] as float32 weights: denormal ones are 0, negative ones infinite."""
    single = entries.astype(jnp.float32)
    kept = jnp.where(single < LEAST, 0.0, single)  # a NaN stays
    # Infinite, not NaN: a NaN of ours among constants would trip `jax_debug_nans` on valid rows.
    return jnp.where(single <= -LEAST, jnp.inf, kept)


def tokens_from(start: Any, size: int) -> jax.Array:
    """Return the tokens start .. start + size - 1, int32 [size]."""
    return start + jnp.arange(size, dtype=jnp.int32)


def tile_sums(
    piece: Piece, vocab: int, *, spans: bool, mended: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Sum the quantities of `piece` over consecutive tiles: a tuple of float32 [ceil(V / TILE)].

    Args:
      piece: gives the quantities of a stretch; the tokens are given to it for single tiles only.
      vocab: V.
      spans: read the row a span of tiles at a time, which is fast on CPU, else all at once.
      mended: int32 [C], tiles that are summed once more, with their tokens given.
    """
    full, tail = divmod(vocab, TILE)

    def of_tile(tile: jax.Array) -> tuple[jax.Array, ...]:
        start, size = tile_span(tile, vocab)
        tokens = tokens_from(start, size)
        is_inside = tokens >= tile * TILE  # the last tile may be short
        return tuple(jnp.sum(jnp.where(is_inside, x, 0.0)) for x in piece(start, size, tokens))

    if vocab <= TILE:
        return tuple(x[None] for x in of_tile(jnp.int32(0)))

    trips = -(-full // SPAN) if spans else 1
    span = -(-full // trips)  # of equal size as far as may be: the last two overlap

    @jax.jit  # to be traced once
    def of_span(first: jax.Array) -> tuple[jax.Array, ...]:
        quantities = piece(first * TILE, span * TILE, None)
        return tuple(sum_rows(x.reshape(span, TILE), spans=spans) for x in quantities)

    def body(trip: jax.Array, done: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = jnp.minimum(trip * span, full - span)
        return tuple(
            lax.dynamic_update_slice(old, x, (first,))
            for old, x in zip(done, of_span(first), strict=True)
        )

    if trips > 1:
        one = zeros_like_result(lambda: of_span(jnp.int32(0)))
        sums = fori_loop(trips, body, tuple(jnp.pad(x, (0, full - span)) for x in one))
    else:
        sums = of_span(jnp.int32(0))
    singles = [] if mended is None else [mended]
    if tail:
        singles.append(jnp.full(1, full, jnp.int32))
        sums = tuple(jnp.pad(x, (0, 1)) for x in sums)
    if singles:
        tiles = jnp.concatenate(singles)
        again = jax.vmap(of_tile)(tiles)
        sums = tuple(x.at[tiles].set(y) for x, y in zip(sums, again, strict=True))
    return sums


def sum_rows(x: jax.Array, *, spans: bool) -> jax.Array:
    """Sum over the last axis of x [n, size]."""
    if not spans:
        return x.sum(axis=1)
    # XLA's CPU backend hands a sum, and all the arithmetic before it, to a library that goes through
    # memory once for each operation. A product with ones leaves the arithmetic in one compiled loop,
    # which is 5 times faster; it is a plain float32 sum in another order.
    return lax.dot(x, jnp.ones(x.shape[1], x.dtype), precision=lax.Precision.HIGHEST)


def even_span(vocab: int) -> int:
    """Return the size of the stretches in which a row is folded: a divisor of V if one fits."""
    most = SPAN * TILE
    if vocab <= most:
        return vocab
    return next((size for size in range(most, most // 4, -1) if vocab % size == 0), most)


def total_of(x: jax.Array, *, spans: bool) -> jax.Array:
    """Sum x [size] in parts of about a tile, so that errors do not add up along it."""
    if not spans:
        return jnp.sum(x)
    size = x.shape[0]
    width = next((width for width in range(TILE // 2, 4 * TILE) if size % width == 0), size)
    return jnp.sum(sum_rows(x.reshape(-1, width), spans=True))


def tile_span(tile: jax.Array, vocab: int) -> tuple[jax.Array, int]:
    """Return (start, size) of a stretch of fixed size that covers a tile."""
    size = min(TILE, vocab)
    return jnp.minimum(tile * TILE, vocab - size), size


def draw_from_tiles(
    pair: jax.Array, sums: jax.Array, piece: Callable[[Any, int], jax.Array], vocab: int
) -> jax.Array:
    """Draw a token, int32 [], with a pair of uniforms: which tile, then where inside it.

    Each choice is the first whose running total exceeds `uniform * total`, and never one of weight 0,
    whatever the draws. `sums` [tiles] are the weights of the tiles, of positive total; `piece` maps
    (start, size) to the weights of the tokens from `start` on.
    """
    tile = invert(pair[0], sums) if sums.shape[0] > 1 else jnp.int32(0)
    start, size = tile_span(tile, vocab)
    inside = tokens_from(start, size) >= tile * TILE  # the last tile may be short
    return start + invert(pair[1], jnp.where(inside, piece(start, size), 0.0))


def invert(u: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the first index whose running total exceeds `u * total`, of positive weight."""
    running = jnp.cumsum(weights)
    size = weights.shape[0]
    positions = jnp.arange(size, dtype=jnp.int32)
    # Running totals are summed in parallel, so they may rise by an ulp at a weight of 0; and at the
    # end rounding may leave none above: then the last positive weight is chosen. Ranks below `size`
    # are of weights whose total is above, those beyond it of the others, the last first.
    ranks = jnp.where(running > u * running[-1], positions, 2 * size - positions)
    rank = jnp.min(jnp.where(weights > 0, ranks, 2 * size))
    return jnp.where(rank < size, rank, 2 * size - rank)


def used_pair(pair: jax.Array, vocab: int) -> jax.Array:
    """Return the numbers of a pair that a draw from V tokens reads: both, or the second alone."""
    return pair if vocab > TILE else pair[1:]


def is_uniform(u: jax.Array) -> jax.Array:
    """Return whether a draw lies in [0, 1); NaN does not."""
    return (u >= 0) & (u < 1)


def draw_token(pair: jax.Array, row: jax.Array) -> jax.Array:
    """Draw one token from a row of weights, as every draft and final draw of jaxspec does.

    The token has the law `row / sum(row)`, to 2^-24 of each tile's share.

    Args:
      pair: float32 [2] in [0, 1): which tile of 512 tokens, where inside it. For V up to 512 only
        the second number matters.
      row: float [V], finite and non-negative weights; one below the least normal float32 counts as 0.

    Returns:
      int32 [], a token of positive weight; -1 if the row has no mass or an entry that is negative or
      not finite, or if a number of the pair that is used lies outside [0, 1).

    >>> import jax.numpy as jnp
    >>> int(draw_token(jnp.array([0.0, 0.6]), jnp.array([0.5, 0.0, 0.5])))
    2
    """
    assert_array("pair", pair, {"2": 2}, jnp.floating)
    assert_array("row", row, {"V": None}, jnp.floating)
    weights = weights_of(row)
    vocab = row.shape[0]

    def piece(start: Any, size: int) -> jax.Array:
        return lax.dynamic_slice(weights, (jnp.asarray(start, jnp.int32),), (size,))

    (sums,) = tile_sums(lambda start, size, _: (piece(start, size),), vocab, spans=False)
    total = jnp.sum(sums)
    is_valid = jnp.isfinite(total) & (total > 0) & jnp.all(is_uniform(used_pair(pair, vocab)))
    return jnp.where(is_valid, draw_from_tiles(pair, sums, piece, vocab), -1)
