"""Logits as rows: temperature, top-k, top-p, min-p, one visited row at a time.

What must be known of a whole row (its max logit, the sum of its exponentials, the greedy token) is
read in one pass when the row is first visited. A row that is filtered is read again for the cutoff.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import assert_array, check_all, struct
from jaxspec.loops import fori_loop, varying_alike, when
from jaxspec.rows import Normalizer, RowSource, StoredRow, assert_floats, window
from jaxspec.tiles import LEAST, tokens_from, total_of

_HEAD = 256
"""Greatest logits that are sorted for a filter; what needs more of them is found bit by bit."""


@struct
class LogitNormalizer:
    """The result of one pass over a row of logits."""

    max_logit: jax.Array  # []
    # Sum of exp((logit - max_logit) / temperature) over the tokens that are kept, at temperature 0
    # as at 1; not finite if any logit is NaN or +inf.
    total: jax.Array  # []
    greedy: jax.Array  # [] the lowest token of the greatest logit, for greedy decoding only
    cutoff: jax.Array  # [] the least logit that the filters keep; -inf without filters


@struct
class Logits(RowSource):
    """Rows stored as logits, with the temperature they are sampled at.

    A row's law is softmax(logits / temperature). At temperature 0, and with top_k = 1, decoding is
    greedy: the law is exactly the point mass on the lowest token of greatest logit. Logits may be
    -inf (the token cannot occur); NaN, +inf and rows in which every logit is -inf are invalid.

    Filters are applied in one order: temperature, top-k, top-p, min-p; what they keep is normalized
    again. Top-k keeps the k greatest logits, top-p of these the fewest greatest whose mass reaches p,
    min-p of these the ones at least min_p times as probable as the most probable token. That is the
    order of transformers and sglang; vLLM applies min-p before top-k and top-p, so that the mass that
    top-p counts is of what min-p keeps.
    Tokens of equal logit are kept or dropped together (except for top_k = 1), so that the result does
    not depend on the order of the vocabulary. A verifier reproduces the filtered law.

    A temperature, top_k, top_p or min_p outside its range makes every row invalid: no token, and
    `Status.NON_FINITE_ROW`.

    Attributes:
      values: float [R, W], logits in nats. Any float dtype; computed with in float32.
      temperature: float32 [], finite and at least 0; 0 for greedy.
      first: int32 [], index in `values` of this sequence's row 0. None means 0.
      vocab: V, if the slab is wider (static); see `RowSource`.
      top_k: int32 [], at least 1; V or more keeps all, and so do 0 and -1, by which engines mean
        "off". None for no such filter.
      top_p: float32 [], in (0, 1]; 1 keeps all. None for no such filter.
      min_p: float32 [], in [0, 1]; 0 keeps all. None for no such filter.
    """

    temperature: jax.Array  # []
    top_k: jax.Array | None = None  # []
    top_p: jax.Array | None = None  # []
    min_p: jax.Array | None = None  # []

    def visit(self, row: StoredRow) -> Normalizer:
        """Read the row once: max logit, total at this temperature, greedy token."""

        def raw(start: Any, size: int) -> jax.Array:
            return row.read(start, size).astype(jnp.float32)

        def weigh(
            start: Any, size: int, so_far: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            max_logit, total = so_far
            piece = raw(start, size)
            new_max = jnp.maximum(max_logit, jnp.max(piece))
            weights = self._exponential(piece, new_max)
            added = total_of(weights, spans=row.spans)
            return new_max, total * self._exponential(max_logit, new_max) + added

        def lowest_at_max() -> jax.Array:
            is_max = raw(0, row.vocab) == max_logit
            return jnp.min(jnp.where(is_max, tokens_from(0, row.vocab), row.vocab))

        # A fold's state varies over a mesh as its results do.
        nothing, _ = varying_alike(((jnp.float32(-jnp.inf), jnp.float32(0)), self.temperature))
        max_logit, total = row.fold(weigh, nothing)
        greedy = when(self._is_greedy(), lowest_at_max)
        cutoff = jnp.float32(-jnp.inf)
        if self._has_filters:
            is_filtered = self._is_filtered(row.vocab) & jnp.isfinite(total) & (total > 0)
            found, kept = when(is_filtered, lambda: self._filter(raw(0, row.vocab), max_logit))
            cutoff = jnp.where(is_filtered, found, cutoff)
            total = jnp.where(is_filtered, kept, total)
        # The logarithm of -1 is NaN, which no constant of the program is (`jax_debug_nans`).
        is_in_range = functools.reduce(
            jnp.logical_and, [valid for _, _, valid, _ in self._ranges()]
        )
        total += jnp.log(jnp.where(is_in_range, jnp.float32(1), jnp.float32(-1)))
        return LogitNormalizer(max_logit=max_logit, total=total, greedy=greedy, cutoff=cutoff)

    def mass(self, norm: Normalizer) -> jax.Array:
        """Return the sum of exponentials."""
        return norm.total

    def probability(self, entries: jax.Array, tokens: jax.Array, norm: Normalizer) -> jax.Array:
        """Turn logits of a visited row into probabilities.

        Invalid values propagate: the entries are NaN for a row with a NaN or +inf and for a parameter
        outside its range; a row of only -inf has no mass.
        """
        exact = entries.astype(jnp.float32)
        sampled = self._exponential(exact, norm.max_logit)
        if self._has_filters:
            sampled = jnp.where(exact < norm.cutoff, 0.0, sampled)  # a NaN stays
        # Only a row of only -inf has total 0: its entries are then 0, not 0 / 0.
        sampled /= jnp.where(norm.total == 0, 1.0, norm.total)
        greedy = jnp.where((tokens == norm.greedy) & (norm.max_logit > -jnp.inf), 1.0, 0.0)
        # Some reductions that XLA calls lose a NaN in the max logit. The total does not.
        greedy += 0.0 * norm.total
        return jnp.where(self._is_greedy(), greedy, sampled)

    def validate(self, name: str) -> None:
        """Assert static shapes and dtypes."""
        super().validate(name)
        assert_floats(name, self.values)
        assert_array(f"{name} rows: temperature", self.temperature, {}, jnp.floating)
        if self.top_k is not None:
            assert_array(f"{name} rows: top_k", self.top_k, {}, jnp.integer)
        for field in ("top_p", "min_p"):
            if (value := getattr(self, field)) is not None:
                assert_array(f"{name} rows: {field}", value, {}, jnp.floating)

    def check(self, name: str, is_used: jax.Array) -> None:
        """Check the parameters, and that used logits are finite or -inf, one at least finite."""
        for field, value, is_valid, wanted in self._ranges():
            message = f"{name} {field} is {{value}}: it must be {wanted}"
            check_all(is_valid, message, value=value)
        rows = window(self, is_used.shape[0]).astype(jnp.float32)
        check_all(
            ~is_used[:, None] | (rows < jnp.inf),
            name + " row {i0}: logit {i1} is {value}: only finite logits and -inf are allowed",
            value=rows,
        )
        check_all(
            ~is_used | (rows.max(axis=1) > -jnp.inf),
            name + " row {i0}: every logit is -inf, so the row has no mass",
        )

    def _ranges(self) -> list[tuple[str, jax.Array, jax.Array, str]]:
        """List (parameter, its value, whether that is valid, what is)."""
        is_valid = (self.temperature >= 0) & (self.temperature < jnp.inf)
        ranges = [("temperature", self.temperature, is_valid, "finite and at least 0")]
        if (k := self.top_k) is not None:
            ranges.append(("top_k", k, k >= -1, "at least 1, or 0 or -1 for no filter"))
        if (p := self.top_p) is not None:
            ranges.append(("top_p", p, (p > 0) & (p <= 1), "above 0 and at most 1"))
        if (p := self.min_p) is not None:
            ranges.append(("min_p", p, (p >= 0) & (p <= 1), "from 0 to 1"))
        return ranges

    @property
    def _has_filters(self) -> bool:
        return any(each is not None for each in (self.top_k, self.top_p, self.min_p))

    def _is_greedy(self) -> jax.Array:
        """Return whether top_k is 1 or the temperature is too small to divide by."""
        is_cold = (self.temperature >= 0) & (self.temperature < LEAST)
        return is_cold if self.top_k is None else is_cold | (self.top_k == 1)

    def _is_filtered(self, vocab: int) -> jax.Array:
        """Return whether a filter may drop a token."""
        by_top_k = jnp.bool_(False)
        if self.top_k is not None:
            by_top_k = (self.top_k > 0) & (self.top_k < vocab)
        by_top_p = jnp.bool_(False) if self.top_p is None else self.top_p < 1
        by_min_p = jnp.bool_(False) if self.min_p is None else self.min_p > 0
        return (by_top_k | by_top_p | by_min_p) & ~self._is_greedy()

    def _filter(self, row: jax.Array, max_logit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (the least logit that the filters keep, the total that they keep)."""
        weights = self._exponential(row, max_logit)
        is_kept = weights > 0
        if self.top_k is not None or self.top_p is not None:
            head = lax.top_k(row, min(_HEAD, row.shape[0]))[0]
        if self.top_k is not None:
            rank = jnp.where(self.top_k > 0, jnp.minimum(self.top_k, row.shape[0]), row.shape[0])
            ones, first = (jnp.ones(x.shape, jnp.float32) for x in (row, head))
            kth = _least_of(row, ones, rank.astype(jnp.float32), head, first)
            is_kept &= row >= kth
        if self.top_p is not None:
            kept = jnp.where(is_kept, weights, 0.0)
            wanted = self.top_p.astype(jnp.float32) * jnp.sum(kept)
            least = _least_of(row, kept, wanted, head, self._exponential(head, max_logit))
            is_kept &= row >= least
        if self.min_p is not None:
            is_kept &= weights >= self.min_p.astype(jnp.float32)  # the most probable token weighs 1
        # Rounding may not drop the most probable token.
        cutoff = jnp.minimum(jnp.min(jnp.where(is_kept, row, jnp.inf)), max_logit)
        return cutoff, jnp.sum(jnp.where(is_kept, weights, 0.0))

    def _exponential(self, logit: jax.Array, max_logit: jax.Array) -> jax.Array:
        """Return exp((logit - max_logit) / temperature); 0 for -inf, NaN for NaN."""
        is_warm = (self.temperature >= LEAST) & (self.temperature < jnp.inf)
        temperature = jnp.where(is_warm, self.temperature, 1.0).astype(jnp.float32)
        # -inf - -inf would be NaN: a token that cannot occur has weight 0 whatever the max logit.
        offset = logit - jnp.where(max_logit == -jnp.inf, 0.0, max_logit)
        scaled = jnp.where(logit == -jnp.inf, -jnp.inf, offset / temperature)
        # XLA on CPU folds exp(nan / x) of a constant NaN to any number: keep the NaN itself.
        return jnp.where(jnp.isnan(scaled), scaled, jnp.exp(scaled))


def _least_of(
    row: jax.Array, weights: jax.Array, wanted: jax.Array, head: jax.Array, head_weights: jax.Array
) -> jax.Array:
    """Return the greatest logit such that it and all above it weigh at least `wanted`.

    Among the greatest logits, which are sorted, it is looked up. If their weight does not suffice, the
    bits of the logit are found from the highest on, by one pass over the row for each: sorting a row
    of a real vocabulary takes thirty times as long.

    Args:
      row: float32 [V].
      weights: float32 [V], non-negative.
      wanted: [], positive.
      head: float32 [H], the greatest logits, falling.
      head_weights: float32 [H], their weights, at least as far down as the result.
    """
    place = jnp.sum(jnp.cumsum(head_weights) < wanted, dtype=jnp.int32)
    looked_up = head[jnp.minimum(place, head.shape[0] - 1)]
    if head.shape == row.shape:
        return looked_up
    keys = _sortable(row)

    def bit(trip: jax.Array, key: jax.Array) -> jax.Array:
        higher = key | (jnp.uint32(1) << jnp.asarray(31 - trip, jnp.uint32))
        enough = jnp.sum(jnp.where(keys >= higher, weights, 0.0)) >= wanted
        return jnp.where(enough, higher, key)

    def by_bits() -> jax.Array:
        key = fori_loop(32, bit, varying_alike((jnp.uint32(0), keys, weights))[0])
        return jnp.min(jnp.where(keys >= key, row, jnp.inf))

    is_beyond = place == head.shape[0]
    return jnp.where(is_beyond, when(is_beyond, by_bits), looked_up)


def _sortable(row: jax.Array) -> jax.Array:
    """Return float32 values as uint32 of the same order."""
    bits = lax.bitcast_convert_type(row, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
