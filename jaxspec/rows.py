"""One next-token row [V]: where it comes from, its mass by blocks, a draw from it.

A row source answers for many rows at once without ever normalising one that nobody visits. It is a
slab of rows and the index of the first row that belongs to this sequence, so that a batch is a
batch of offsets into one slab.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import MASS_TOLERANCE, check_all, record

T = TypeVar("T")

BLOCK = 512
"""Tokens in a block of the vocabulary. A draw first picks a block, then a token inside it."""

SPAN = 32
"""Blocks summed at a time on CPU, so that a span of two rows stays in the cache."""

Normaliser: TypeAlias = Any
"""What a source must know of a whole row before it can give one entry (nothing, or a few scalars)."""


class RowSource(Protocol):
    """Rows by index, normalised entry by entry."""

    @property
    def values(self) -> jax.Array:
        """The slab of rows [R, V] as stored."""

    @property
    def first(self) -> jax.Array | None:
        """Index in the slab of this sequence's row 0; None for 0."""

    def visit(self, row: jax.Array, *, spans: bool) -> Normaliser:
        """Read row `row` once, if that is needed to normalise its entries."""

    def probability(self, raw: jax.Array, tokens: jax.Array, norm: Normaliser) -> jax.Array:
        """Turn stored entries of a visited row into float32 probabilities."""

    def check(self, name: str, is_used: jax.Array) -> None:
        """Check under a trace the values of the rows that are used, bool [num_rows]."""


@record
class Probabilities:
    """Rows stored as probabilities.

    Attributes:
      values: float [R, V], each row a distribution. Any float dtype; computed with in float32.
      first: int32 [], index in `values` of this sequence's row 0. None means 0.
    """

    values: jax.Array  # [R, V]
    first: jax.Array | None = None  # []

    def visit(self, row: jax.Array, *, spans: bool) -> Normaliser:
        """Read nothing: probabilities are normalised already."""
        del row, spans
        return ()

    def probability(self, raw: jax.Array, tokens: jax.Array, norm: Normaliser) -> jax.Array:
        """Return the stored entries in float32."""
        del tokens, norm
        return raw.astype(jnp.float32)

    def check(self, name: str, is_used: jax.Array) -> None:
        """Check that used rows are finite, non-negative and of unit mass."""
        rows = window(self, is_used.shape[0]).astype(jnp.float32)
        unused = ~is_used[:, None]
        tolerance = MASS_TOLERANCE[self.values.dtype.name]
        place = name + " row {i0}: entry {i1} is {value}"
        check_all(unused | jnp.isfinite(rows), place, value=rows)
        check_all(unused | (rows >= 0), place + ", below 0", value=rows)
        mass = rows.sum(axis=1)
        check_all(
            ~is_used | (jnp.abs(mass - 1) <= tolerance),
            name + " row {i0}: mass is {mass}, not 1 within " + str(tolerance),
            mass=mass,
        )


def when(condition: jax.Array, make: Callable[[], T]) -> T:
    """Return `make()` if the condition holds, else zeros, doing the work only then.

    A loop of one trip or none: unlike `cond` it stays lazy under `vmap`, where it runs if any row
    of the batch needs it.
    """
    shapes = jax.eval_shape(make)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    once = (condition, zeros)
    return lax.while_loop(lambda state: state[0], lambda _: (jnp.zeros((), bool), make()), once)[1]


def window(source: RowSource, num_rows: int) -> jax.Array:
    """Return the rows of this sequence as stored, [num_rows, V]."""
    if source.first is None:
        return source.values[:num_rows]
    return lax.dynamic_slice_in_dim(source.values, source.first, num_rows)


def index_of(source: RowSource, row: jax.Array) -> jax.Array:
    """Return the index in `source.values` of this sequence's row `row`."""
    return row if source.first is None else source.first + row


def entries(source: RowSource, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gather single entries as stored: `values[rows[i], tokens[i]]`, both clipped into range."""
    num_rows, vocab = source.values.shape
    where = jnp.clip(index_of(source, rows), 0, num_rows - 1)
    return source.values[where, jnp.clip(tokens, 0, vocab - 1)]


def stretch(
    source: RowSource, row: jax.Array, norm: Normaliser, start: jax.Array | int, size: int
) -> jax.Array:
    """Return probabilities [size] of the consecutive tokens of one row from `start` on."""
    raw = lax.dynamic_slice(source.values, (index_of(source, row), start), (1, size))[0]
    return source.probability(raw, start + jnp.arange(size), norm)


def row_of(source: RowSource, row: jax.Array) -> jax.Array:
    """Return all probabilities of one row, float32 [V]: the law that a draft token is drawn from."""
    norm = source.visit(row, spans=False)
    return stretch(source, row, norm, 0, source.values.shape[1])


def block_sums(
    piece: Callable[[Any, int], tuple[jax.Array, ...]], vocab: int, *, spans: bool
) -> tuple[jax.Array, ...]:
    """Sum quantities over consecutive blocks of the vocabulary.

    Args:
      piece: maps (start, size) to a tuple of float32 [size], the quantities of tokens
        start .. start + size - 1.
      vocab: V.
      spans: go through the row a span of blocks at a time (fast on CPU) or all at once.

    Returns:
      A tuple of float32 [ceil(V / BLOCK)].
    """
    full, tail = divmod(vocab, BLOCK)

    def sums(start: Any, blocks: int) -> tuple[jax.Array, ...]:
        return tuple(
            sum_rows(x.reshape(blocks, BLOCK), spans=spans) for x in piece(start, blocks * BLOCK)
        )

    span = min(SPAN, full) if spans else full
    parts = []
    if span:
        trips, rest = divmod(full, span)
        if trips > 1:
            shapes = jax.eval_shape(lambda: sums(0, span))
            empty = tuple(jnp.zeros(trips * span, s.dtype) for s in shapes)

            def body(trip: jax.Array, done: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                new = sums(trip * (span * BLOCK), span)
                return tuple(
                    lax.dynamic_update_slice(old, x, (trip * span,))
                    for old, x in zip(done, new, strict=True)
                )

            parts.append(lax.fori_loop(0, trips, body, empty))
        else:
            parts.append(sums(0, span))
        if rest:
            parts.append(sums(trips * span * BLOCK, rest))
    if tail:
        parts.append(tuple(x.sum(keepdims=True) for x in piece(full * BLOCK, tail)))
    return tuple(jnp.concatenate(xs) for xs in zip(*parts, strict=True))


def sum_rows(x: jax.Array, *, spans: bool) -> jax.Array:
    """Sum each row of x."""
    if not spans:
        return x.sum(axis=1)
    # XLA's CPU backend hands a sum, and all the arithmetic before it, to a library that goes through
    # memory once for each operation. A product with ones leaves the arithmetic in one compiled loop,
    # which is 5 times faster; it is a plain float32 sum in another order.
    return lax.dot(x, jnp.ones(x.shape[1], x.dtype), precision=lax.Precision.HIGHEST)


def block_span(block: jax.Array, vocab: int) -> tuple[jax.Array, int]:
    """Return (start, size) of a stretch of fixed size that covers block `block` of the row."""
    size = min(BLOCK, vocab)
    return jnp.minimum(block * BLOCK, vocab - size), size


def draw_from_blocks(
    pair: jax.Array,
    sums: jax.Array,
    piece: Callable[[Any, int], jax.Array],
    vocab: int,
) -> jax.Array:
    """Draw a token with a pair of uniforms: which block, then where inside it.

    A token of weight 0 is never drawn, whatever the draws: each choice is the first whose running
    total exceeds `uniform * total`, and never one of weight 0.

    Args:
      pair: float32 [2] in [0, 1).
      sums: float32 [blocks], weight of each block; the total is positive.
      piece: weights [size] of the tokens from a start on, as in `block_sums`.
      vocab: V.

    Returns:
      int32 [], the token.
    """
    block = invert(pair[0], sums) if sums.shape[0] > 1 else jnp.int32(0)
    start, size = block_span(block, vocab)
    inside = start + jnp.arange(size) >= block * BLOCK  # the last block may be short
    return start + invert(pair[1], jnp.where(inside, piece(start, size), 0.0))


def invert(u: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the first index whose running total exceeds `u * total`, of positive weight."""
    running = jnp.cumsum(weights)
    index = jnp.sum(running <= u * running[-1], dtype=jnp.int32)
    # Running totals are summed in parallel, so they may rise by an ulp at a weight of 0; and at the
    # end rounding may leave nothing above. The choice is moved on to a weight that is there.
    positions = jnp.arange(weights.shape[0], dtype=jnp.int32)
    last = jnp.max(jnp.where(weights > 0, positions, 0))
    onwards = jnp.where((weights > 0) & (positions >= index), positions, last)
    return jnp.min(onwards)


def used_pair(pair: jax.Array, vocab: int) -> jax.Array:
    """Return the numbers of a pair that a draw from V tokens reads: both, or the second alone."""
    return pair if vocab > BLOCK else pair[1:]


def is_uniform(u: jax.Array) -> jax.Array:
    """Tell whether a draw lies in [0, 1); NaN does not."""
    return (u >= 0) & (u < 1)


def draw_token(pair: jax.Array, row: jax.Array) -> jax.Array:
    """Draw one token from a row of weights, as every draft and final draw of jaxspec does.

    The token has the law `row / sum(row)`, to 2^-24 of each block's share.

    Args:
      pair: float32 [2] in [0, 1): which block of `BLOCK` tokens, where inside it. For V up to
        `BLOCK` only the second number matters.
      row: float [V], finite and non-negative weights.

    Returns:
      int32 [], a token of positive weight; -1 if the row has no mass, holds an entry that is not
      finite, or a number of the pair that is used lies outside [0, 1).

    >>> import jax.numpy as jnp
    >>> int(draw_token(jnp.array([0.0, 0.6]), jnp.array([0.5, 0.0, 0.5])))
    2
    """
    chex.assert_rank([pair, row], 1)
    chex.assert_shape(pair, (2,))
    row = row.astype(jnp.float32)
    vocab = row.shape[0]

    def piece(start: Any, size: int) -> jax.Array:
        return lax.dynamic_slice(row, (start,), (size,))

    (sums,) = block_sums(lambda start, size: (positive(piece(start, size)),), vocab, spans=False)
    total = jnp.sum(sums)
    fine = jnp.isfinite(total) & (total > 0) & jnp.all(is_uniform(used_pair(pair, vocab)))
    return jnp.where(fine, draw_from_blocks(pair, sums, piece, vocab), -1)


def positive(x: jax.Array) -> jax.Array:
    """Return max(x, 0) where x is finite and NaN elsewhere, so that no bad entry is laundered."""
    return jnp.maximum(x, 0.0) + 0.0 * x


def overlap(first: jax.Array, second: jax.Array) -> jax.Array:
    """Return `sum(min(p, q))` over the last axis: the acceptance probability of token verification.

    Args:
      first: float [..., V], probabilities.
      second: float [..., V], probabilities.

    >>> import jax.numpy as jnp
    >>> float(overlap(jnp.array([0.25, 0.75]), jnp.array([0.5, 0.5])))
    0.75
    """
    chex.assert_equal_shape([first, second])
    return jnp.minimum(first.astype(jnp.float32), second.astype(jnp.float32)).sum(axis=-1)
