"""One next-token row [V]: where it comes from, its mass by blocks, a draw from it.

The law of a stored row is `row / sum(row)`, whatever its dtype: that is what a token is drawn from
and what it is tested against. An entry closer to 0 than the least normal float32 counts as 0, since
devices differ in whether they keep such numbers. A row with a negative or non-finite entry is bad.

A row source answers for many rows at once without ever normalising one that nobody visits. It is a
slab of rows and the index of the first row that belongs to this sequence, so that a batch is a
batch of offsets into one slab.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import MASS_TOLERANCE, assert_array, assert_whole, check_all, described, struct
from jaxspec.loops import fori_loop, zeros_like_result

TILE = 512
"""Tokens in a block of the vocabulary. A draw first picks a block, then a token inside it."""

SPAN = 32
"""BatchedNetwork summed at a time on CPU, so that a span of two rows stays in the cache."""

LEAST = 1.1754944e-38
"""The least normal float32. Smaller weights count as 0, smaller temperatures are 0."""

TRUST = 2.0**-21
"""A measured mass this close to 1 counts as 1 in a final draw, whose law is then off by less than
5e-7. Candidates are tested with exact masses, for what a test is off by adds up along a path."""

Normaliser: TypeAlias = Any
"""What a source must know of a whole row before it can give one entry: a few scalars."""


class RowSource(Protocol):
    """Rows by index, normalised entry by entry."""

    @property
    def values(self) -> jax.Array:
        """The slab of rows [R, V] as stored."""

    @property
    def first(self) -> jax.Array | None:
        """Index in the slab of this sequence's row 0; None for 0."""

    @property
    def mass_tolerance(self) -> float:
        """How far from 1 the mass of a sound row may lie."""

    @property
    def may_trust(self) -> bool:
        """Whether a row's mass may be taken for 1 until it matters: the normaliser is the mass."""

    def visit(self, row: jax.Array, *, spans: bool) -> Normaliser:
        """Read row `row` once."""

    def mass(self, norm: Normaliser) -> jax.Array:
        """Return the mass of a visited row: not finite if an entry is bad, 0 if there is none."""

    def probability(self, raw: jax.Array, tokens: jax.Array, norm: Normaliser) -> jax.Array:
        """Turn stored entries of a visited row into float32 probabilities."""

    def summand(self, raw: jax.Array, tokens: jax.Array, norm: Normaliser) -> jax.Array:
        """Do as `probability` does for final draws: a mass within `TRUST` counts as 1."""

    def check(self, name: str, is_used: jax.Array) -> None:
        """Check under a trace the values of the rows that are used, bool [num_rows]."""


@struct
class Probabilities:
    """Rows stored as probabilities.

    The law of a row is `row / sum(row)`; its mass must be 1 within a tolerance by dtype (1e-5 for
    float32 and float64, 1e-3 for float16, 1e-2 for bfloat16). Entries are at least 0; one below the
    least normal float32 in size, such as a negative denormal, counts as 0.

    Attributes:
      values: float [R, V], each row a distribution. Any float dtype; computed with in float32.
      first: int32 [], index in `values` of this sequence's row 0. None means 0.
    """

    values: jax.Array  # [R, V]
    first: jax.Array | None = None  # []

    @property
    def mass_tolerance(self) -> float:
        """How far from 1 the mass of a sound row may lie, by dtype."""
        return MASS_TOLERANCE[self.values.dtype.name]

    @property
    def may_trust(self) -> bool:
        """Whether rows are of single precision; in half precision masses are too far from 1."""
        return self.values.dtype.itemsize >= 4

    def visit(self, row: jax.Array, *, spans: bool) -> Normaliser:
        """Read the row once, for its mass."""

        def piece(start: Any, size: int) -> tuple[jax.Array]:
            return (weights_of(slice_of(self, row, start, size)),)

        return jnp.sum(block_sums(piece, self.values.shape[1], spans=spans)[0])

    def mass(self, norm: Normaliser) -> jax.Array:
        """Return the mass."""
        return norm

    def probability(self, raw: jax.Array, tokens: jax.Array, norm: Normaliser) -> jax.Array:
        """Return the entries over the mass of their row; not finite where an entry is below 0."""
        del tokens
        return weights_of(raw) * _inverse(norm)

    def summand(self, raw: jax.Array, tokens: jax.Array, norm: Normaliser) -> jax.Array:
        """Return the entries over the mass of their row; denormal and negative ones stay."""
        del tokens
        counts_as_one = jnp.abs(norm - 1) <= TRUST
        return raw.astype(jnp.float32) * _inverse(jnp.where(counts_as_one, 1.0, norm))

    def check(self, name: str, is_used: jax.Array) -> None:
        """Check that used rows are finite, non-negative and of unit mass."""
        rows = window(self, is_used.shape[0]).astype(jnp.float32)
        unused = ~is_used[:, None]
        place = name + " row {i0}: entry {i1} is {value}"
        check_all(unused | jnp.isfinite(rows), place, value=rows)
        check_all(unused | (rows > -LEAST), place + ", below 0", value=rows)
        mass = weights_of(rows).sum(axis=1)
        check_all(
            ~is_used | (jnp.abs(mass - 1) <= self.mass_tolerance),
            name + " row {i0}: mass is {mass}, not 1 within " + str(self.mass_tolerance),
            mass=mass,
        )


def _inverse(mass: jax.Array) -> jax.Array:
    return 1 / jnp.where(mass == 0, 1.0, mass)


def weights_of(entries: jax.Array) -> jax.Array:
    """Return stored entries as float32 weights: denormal ones are 0, negative ones infinite.

    Args:
      entries: float [...].
    """
    single = entries.astype(jnp.float32)
    kept = jnp.where(single < LEAST, 0.0, single)  # a NaN stays
    # Infinite, not NaN: a NaN of ours among constants would trip `jax_debug_nans` on healthy rows.
    return jnp.where(single <= -LEAST, jnp.inf, kept)


def window(source: RowSource, num_rows: int) -> jax.Array:
    """Return the rows of this sequence as stored, [num_rows, V]; beyond the slab, its last."""
    if source.first is None:
        return source.values[:num_rows]
    # A row at a time: a slab may end before rows that nobody reads.
    where = source.first + jnp.arange(num_rows, dtype=jnp.int32)
    return source.values[jnp.clip(where, 0, source.values.shape[0] - 1)]


def index_of(source: RowSource, row: jax.Array) -> jax.Array:
    """Return the index in `source.values` of this sequence's row `row`."""
    return row if source.first is None else source.first + row


def entries(source: RowSource, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gather single entries as stored: `values[rows[i], tokens[i]]`, both clipped into range."""
    num_rows, vocab = source.values.shape
    where = jnp.clip(index_of(source, rows), 0, num_rows - 1)
    return source.values[where, jnp.clip(tokens, 0, vocab - 1)]


def slice_of(source: RowSource, row: jax.Array, start: Any, size: int) -> jax.Array:
    """Return stored entries [size] of the consecutive tokens of one row from `start` on."""
    where = (jnp.asarray(index_of(source, row), jnp.int32), jnp.asarray(start, jnp.int32))
    return lax.dynamic_slice(source.values, where, (1, size))[0]


def stretch(
    source: RowSource, row: jax.Array, norm: Normaliser, start: jax.Array | int, size: int
) -> jax.Array:
    """Return probabilities [size] of the consecutive tokens of one row from `start` on."""
    tokens = start + jnp.arange(size, dtype=jnp.int32)
    return source.probability(slice_of(source, row, start, size), tokens, norm)


def row_of(source: RowSource, row: jax.Array) -> jax.Array:
    """Return all probabilities of one row, float32 [V]: the law that a draft token is drawn from."""
    norm = source.visit(row, spans=False)
    return stretch(source, row, norm, 0, source.values.shape[1])


def dense_rows(rows: RowSource | jax.Array, num_rows: int) -> jax.Array:
    """Return the rows of one sequence as probabilities, float32 [num_rows, V].

    For a rule of one's own that indexes rows, and for tests. The library's verifiers read single
    entries, and only of the rows that they visit; this reads every row.

    Args:
      rows: `Probabilities` or `Logits`, or a float array [R, V] of probabilities.
      num_rows: how many, from the sequence's first on.

    Returns:
      The rows; NaN where one lies outside the slab.

    Raises:
      ValueError: `rows` is of another kind, or `num_rows` is more than the slab has.

    >>> import jax.numpy as jnp
    >>> from jaxspec import Logits, dense_rows
    >>> dense_rows(Logits(values=jnp.zeros((1, 2)), temperature=jnp.float32(1)), 1).tolist()
    [[0.5, 0.5]]
    """
    assert_whole("num_rows", num_rows, 0)
    source: RowSource
    if isinstance(rows, jax.Array | np.ndarray):
        source = Probabilities(values=jnp.asarray(rows))
    elif hasattr(rows, "values") and hasattr(rows, "visit"):
        source = rows
    else:
        wanted = "an array [N, V] of probabilities, a Probabilities or a Logits"
        raise ValueError(f"rows is {described(rows)}: must be {wanted}")
    assert_array("rows", source.values, {"N": None, "V": None}, jnp.floating)
    if num_rows > source.values.shape[0]:
        raise ValueError(f"num_rows is {num_rows}: the slab has {source.values.shape[0]} rows")
    return _dense_rows(source, num_rows)


@functools.partial(jax.jit, static_argnums=1)
def _dense_rows(source: RowSource, num_rows: int) -> jax.Array:
    places = jnp.arange(num_rows, dtype=jnp.int32)
    rows = jax.vmap(lambda row: row_of(source, row))(places)
    if source.first is None:
        return rows
    slab = source.values.shape[0]
    is_inside = (source.first >= 0) & (source.first < slab) & (places < slab - source.first)
    return rows + jnp.log(jnp.where(is_inside, 1.0, -1.0))[:, None]  # the logarithm of -1 is NaN


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
      A tuple of float32 [ceil(V / TILE)].
    """
    full, tail = divmod(vocab, TILE)

    def sums(start: Any, blocks: int) -> tuple[jax.Array, ...]:
        return tuple(
            sum_rows(x.reshape(blocks, TILE), spans=spans) for x in piece(start, blocks * TILE)
        )

    span = min(SPAN, full) if spans else full
    parts = []
    if span:
        trips, rest = divmod(full, span)
        if trips > 1:
            one = zeros_like_result(lambda: sums(jnp.int32(0), span))
            empty = tuple(jnp.tile(x, trips) for x in one)

            def body(trip: jax.Array, done: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                new = sums(trip * (span * TILE), span)
                return tuple(
                    lax.dynamic_update_slice(old, x, (trip * span,))
                    for old, x in zip(done, new, strict=True)
                )

            parts.append(fori_loop(trips, body, empty))
        else:
            parts.append(sums(0, span))
        if rest:
            parts.append(sums(trips * span * TILE, rest))
    if tail:
        parts.append(tuple(x.sum(keepdims=True) for x in piece(full * TILE, tail)))
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
    size = min(TILE, vocab)
    return jnp.minimum(block * TILE, vocab - size), size


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
    inside = (
        start + jnp.arange(size, dtype=jnp.int32) >= block * TILE
    )  # the last block may be short
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
    return pair if vocab > TILE else pair[1:]


def is_uniform(u: jax.Array) -> jax.Array:
    """Tell whether a draw lies in [0, 1); NaN does not."""
    return (u >= 0) & (u < 1)


def draw_token(pair: jax.Array, row: jax.Array) -> jax.Array:
    """Draw one token from a row of weights, as every draft and final draw of jaxspec does.

    The token has the law `row / sum(row)`, to 2^-24 of each block's share.

    Args:
      pair: float32 [2] in [0, 1): which block of `TILE` tokens, where inside it. For V up to
        `TILE` only the second number matters.
      row: float [V], finite and non-negative weights; one below the least normal float32 counts as 0.

    Returns:
      int32 [], a token of positive weight; -1 if the row has no mass, holds an entry that is negative
      or not finite, or a number of the pair that is used lies outside [0, 1).

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

    (sums,) = block_sums(lambda start, size: (piece(start, size),), vocab, spans=False)
    total = jnp.sum(sums)
    fine = jnp.isfinite(total) & (total > 0) & jnp.all(is_uniform(used_pair(pair, vocab)))
    return jnp.where(fine, draw_from_blocks(pair, sums, piece, vocab), -1)


def overlap(first: jax.Array, second: jax.Array) -> jax.Array:
    """Return `sum(min(p, q))` over the last axis: the acceptance probability of token verification.

    Args:
      first: float [..., V], probabilities.
      second: float [..., V], probabilities.

    >>> import jax.numpy as jnp
    >>> float(overlap(jnp.array([0.25, 0.75]), jnp.array([0.5, 0.5])))
    0.75
    """
    for name, rows in (("first", first), ("second", second)):
        if not isinstance(rows, jax.Array | np.ndarray):
            raise ValueError(f"{name} is {described(rows)}: must be an array of probabilities")
    if first.shape != second.shape:
        raise AssertionError(f"first has shape {first.shape}, second {second.shape}: must be equal")
    return jnp.minimum(first.astype(jnp.float32), second.astype(jnp.float32)).sum(axis=-1)
