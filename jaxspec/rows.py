"""Next-token rows [V]: how they are stored, read and normalized.

A `RowSource` is a slab of stored rows and the way in which its entries become probabilities. The
verifiers know no other type of rows: `Probabilities` and `Logits` are two sources, and a custom one
(masked, quantized) is a subclass. A source never normalizes a row that is not visited. A sequence is
an offset into a slab, so that a batch is a batch of offsets into one slab.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import (
    MASS_TOLERANCE,
    assert_between,
    assert_told_apart,
    assert_whole,
    check_all,
    described,
    struct,
)
from jaxspec.loops import fori_loop, varying_alike
from jaxspec.slabs.base import AnySlab, assert_slab, read
from jaxspec.tiles import LEAST, even_span, tile_sums, tokens_from, weights_of

T = TypeVar("T")

UNIT_MASS = 2.0**-21
"""A measured mass this close to 1 counts as 1 in a final draw, whose law is then off by less than
5e-7. Candidates are tested with exact masses, since errors of a test add up along a path."""

Normalizer: TypeAlias = Any
"""What a source must know of a whole row before it can give one entry: a pytree of scalars."""


@dataclasses.dataclass(frozen=True)
class StoredRow:
    """One row of a slab, read by stretches of consecutive tokens.

    Attributes:
      slab: [R, W], rows as stored.
      index: int32 [], which of them.
      vocab: V, how many of its W entries are tokens.
      spans: whether `sum` and `fold` go span by span (fast on CPU) or through the row at once.
    """

    slab: AnySlab  # [R, W]
    index: jax.Array  # []
    vocab: int
    spans: bool = False

    def read(self, start: Any, size: int) -> jax.Array:
        """Return the stored entries [size] of consecutive tokens."""
        return read(self.slab, self.index, start, size)

    def sum(self, quantity: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        """Sum `quantity(entries, tokens)`, float32 [size] for stored entries [size], over the row."""

        def piece(start: Any, size: int, _: jax.Array | None) -> tuple[jax.Array]:
            return (quantity(self.read(start, size), tokens_from(start, size)),)

        return jnp.sum(tile_sums(piece, self.vocab, spans=self.spans)[0])

    def fold(self, step: Callable[[Any, int, T], T], start: T) -> T:
        """Fold `step(start, size, state)` over the row."""
        span = even_span(self.vocab) if self.spans else self.vocab
        trips, rest = divmod(self.vocab, span)
        start, _ = varying_alike((start, (self.slab, self.index)))
        state = fori_loop(trips, lambda trip, state: step(trip * span, span, state), start)
        return step(trips * span, rest, state) if rest else state


@struct
class RowSource(abc.ABC):
    """Rows by index, normalized entry by entry. The base class of all sources of rows.

    A subclass is a pytree (decorate it with `jaxspec.struct`) whose further fields are the parameters
    of one sequence. It defines `visit` and `probability`, and overrides the rest where the default
    does not fit. All methods but `validate` and `check` are called on a source without its rows
    (`split`): stored entries are arguments.

    Attributes:
      values: [R, W], the slab of rows as stored, or a `jaxspec.slabs.Slab` that computes entries as
        they are read.
      first: int32 [], index in `values` of this sequence's row 0. None means 0.
      vocab: V, if the slab is wider than the vocabulary (static): entries from V on are padding, which
        is never read. None means W.

    >>> @struct
    ... class WithoutToken(RowSource):
    ...     forbidden: jax.Array  # []
    ...     def visit(self, row):
    ...         return row.sum(self.weights)
    ...     def probability(self, entries, tokens, norm):
    ...         return self.weights(entries, tokens) / norm
    ...     def weights(self, entries, tokens):
    ...         return jnp.where(tokens == self.forbidden, 0.0, entries.astype(jnp.float32))
    >>> rows = WithoutToken(values=jnp.array([[0.5, 0.25, 0.25]]), forbidden=jnp.int32(1))
    >>> [round(float(p), 6) for p in dense_rows(rows, 1)[0]]
    [0.666667, 0.0, 0.333333]
    """

    values: AnySlab  # [R, W]
    first: jax.Array | None = None  # []
    vocab: int | None = dataclasses.field(default=None, metadata={"static": True})

    @abc.abstractmethod
    def visit(self, row: StoredRow) -> Normalizer:
        """Read one row once and return what normalizing its entries needs."""

    @abc.abstractmethod
    def probability(self, entries: jax.Array, tokens: jax.Array, norm: Normalizer) -> jax.Array:
        """Turn stored entries [...] of tokens [...] of a visited row into float32 probabilities."""

    def mass(self, norm: Normalizer) -> jax.Array:
        """Return the mass of a visited row: 0 without any, not finite if an entry is invalid."""
        return norm

    def mass_tolerance(self, dtype: Any) -> float:
        """Return by how much the mass of a valid row stored as `dtype` may differ from 1."""
        del dtype
        return float("inf")

    def assumes_unit_mass(self, dtype: Any) -> bool:
        """Whether entries count as probabilities until the mass of their row has been measured.

        Then a stored entry is the probability times a mass that is 1 within the tolerance.
        """
        del dtype
        return False

    def summand(self, entries: jax.Array, tokens: jax.Array, norm: Normalizer) -> jax.Array:
        """Do as `probability` does for final draws: a mass within `UNIT_MASS` counts as 1."""
        return self.probability(entries, tokens, norm)

    def validate(self, name: str) -> None:
        """Assert static shapes and dtypes; `name` is the argument, for the message."""
        assert_slab(name, self.values, self.vocab)
        if self.vocab is not None:
            assert_between(f"vocab of the {name} rows", self.vocab, 1, self.values.shape[1])

    def check(self, name: str, is_used: jax.Array) -> None:
        """Check under a trace (`jaxspec.checked`) the rows that are used, bool [num_rows]."""
        mass = jax.vmap(lambda row: self.mass(self.visit(self.row(row))))(
            jnp.arange(is_used.shape[0], dtype=jnp.int32)
        )
        message = name + " row {i0}: mass is {mass}, not a positive number"
        check_all(~is_used | ((mass > 0) & jnp.isfinite(mass)), message, mass=mass)

    def split(self) -> tuple[AnySlab, Self]:
        """Return (the slab, the source without it: offset and parameters)."""
        return self.values, dataclasses.replace(self, values=None)  # type: ignore[arg-type]

    def row(self, row: jax.Array) -> StoredRow:
        """Return this sequence's row `row` as stored."""
        return StoredRow(self.values, index_of(self, row), vocab_of(self, self.values))


@struct
class Probabilities(RowSource):
    """Rows stored as probabilities.

    The law of a row is `row / sum(row)`; its mass must be 1 within a tolerance by dtype (1e-5 for
    float32 and float64, 1e-3 for float16, 1e-2 for bfloat16). Entries are at least 0; one below the
    least normal float32 in size, such as a negative denormal, counts as 0.

    Attributes:
      values: float [R, W], each row a distribution. Any float dtype; computed with in float32.
      first: int32 [], index in `values` of this sequence's row 0. None means 0.
      vocab: V, if the slab is wider (static); see `RowSource`.
    """

    def visit(self, row: StoredRow) -> Normalizer:
        """Return the mass of the row."""
        return row.sum(lambda entries, _: weights_of(entries))

    def probability(self, entries: jax.Array, tokens: jax.Array, norm: Normalizer) -> jax.Array:
        """Return the entries over the mass of their row; not finite where an entry is negative."""
        del tokens
        return weights_of(entries) * _inverse(norm)

    def mass_tolerance(self, dtype: Any) -> float:
        """Return the tolerance by dtype."""
        return MASS_TOLERANCE[jnp.dtype(dtype).name]

    def assumes_unit_mass(self, dtype: Any) -> bool:
        """True in single precision; in half precision masses differ too much from 1."""
        return jnp.dtype(dtype).itemsize >= 4

    def validate(self, name: str) -> None:
        """Assert static shapes, and a float dtype."""
        super().validate(name)
        assert_floats(name, self.values)

    def summand(self, entries: jax.Array, tokens: jax.Array, norm: Normalizer) -> jax.Array:
        """Return the entries over the mass of their row, with denormal and negative ones kept."""
        del tokens
        counts_as_one = jnp.abs(norm - 1) <= UNIT_MASS
        return entries.astype(jnp.float32) * _inverse(jnp.where(counts_as_one, 1.0, norm))

    def check(self, name: str, is_used: jax.Array) -> None:
        """Check that used rows are finite, non-negative and of unit mass."""
        rows = window(self, is_used.shape[0]).astype(jnp.float32)
        unused = ~is_used[:, None]
        place = name + " row {i0}: entry {i1} is {value}"
        check_all(unused | jnp.isfinite(rows), place, value=rows)
        check_all(unused | (rows > -LEAST), place + ", below 0", value=rows)
        mass, tolerance = weights_of(rows).sum(axis=1), self.mass_tolerance(self.values.dtype)
        message = name + " row {i0}: mass is {mass}, not 1 within " + str(tolerance)
        check_all(~is_used | (jnp.abs(mass - 1) <= tolerance), message, mass=mass)


RowsLike: TypeAlias = jax.Array | RowSource
"""What public functions take as rows: probabilities [R, V] as an array, or a source."""


def as_source(name: str, rows: RowsLike) -> RowSource:
    """Return rows as a source: an array holds probabilities.

    Raises:
      ValueError: naming the argument, if `rows` is neither.
    """
    if isinstance(rows, RowSource):
        assert_told_apart(name, rows)
        return rows
    if isinstance(rows, jax.Array | np.ndarray):
        return Probabilities(values=jnp.asarray(rows))
    wanted = "an array [N, V] of probabilities, a Probabilities, a Logits or another RowSource"
    raise ValueError(f"{name} is {described(rows)}: must be {wanted}")


def assert_floats(name: str, values: AnySlab) -> None:
    """Assert that stored rows are of one of the float dtypes whose masses have a tolerance."""
    if values.dtype.name not in MASS_TOLERANCE:
        raise AssertionError(
            f"{name} rows have dtype {values.dtype.name}: must be a float dtype, one of "
            + ", ".join(MASS_TOLERANCE)
        )


def _inverse(mass: jax.Array) -> jax.Array:
    return 1 / jnp.where(mass == 0, 1.0, mass)


def vocab_of(source: RowSource, slab: AnySlab) -> int:
    """Return how many entries of the rows in a slab are tokens."""
    return slab.shape[1] if source.vocab is None else source.vocab


def index_of(source: RowSource, row: jax.Array) -> jax.Array:
    """Return the index in the slab of this sequence's row `row`."""
    return row if source.first is None else source.first + row


def window(source: RowSource, num_rows: int) -> jax.Array:
    """Return the rows of this sequence as stored, [num_rows, V]; beyond the slab, its last."""
    vocab = vocab_of(source, source.values)
    if source.first is None and isinstance(source.values, jax.Array):
        return source.values[:num_rows, :vocab]
    # Row by row: a slab may end before rows that are never read.
    where = index_of(source, jnp.arange(num_rows, dtype=jnp.int32))
    return jax.vmap(lambda row: read(source.values, row, 0, vocab))(where)


def row_of(source: RowSource, row: jax.Array) -> jax.Array:
    """Return all probabilities of one row, float32 [V]: the law that a draft token is drawn from."""
    stored = source.row(row)
    norm = source.visit(stored)
    tokens = tokens_from(0, stored.vocab)
    return source.probability(stored.read(0, stored.vocab), tokens, norm)


def dense_rows(rows: RowsLike, num_rows: int) -> jax.Array:
    """Return the rows of one sequence as probabilities, float32 [num_rows, V].

    For custom rules that index rows, and for tests. The verifiers of jaxspec read single entries of
    the rows that they visit; this reads every row.

    Args:
      rows: a `RowSource`, or a float array [R, V] of probabilities.
      num_rows: how many, from the sequence's first on.

    Returns:
      The rows; NaN where one lies outside the slab.

    Raises:
      ValueError: `rows` is of another type, or `num_rows` is more than the slab has.

    >>> import jax.numpy as jnp
    >>> from jaxspec import Logits, dense_rows
    >>> dense_rows(Logits(values=jnp.zeros((1, 2)), temperature=jnp.float32(1)), 1).tolist()
    [[0.5, 0.5]]
    """
    assert_whole("num_rows", num_rows, 0)
    source = as_source("rows", rows)
    source.validate("given")
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
