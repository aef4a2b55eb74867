"""Logits to rows: temperature, top-k, top-p, one visited row at a time.

A row of logits becomes probabilities only where somebody asks. What must be known of the whole row
(its greatest logit, the mass of its exponentials, the token that greedy decoding takes) is read in
one pass when the row is first visited; only a row that is filtered is sorted besides.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxspec.checks import check_all, struct
from jaxspec.loops import fori_loop, varying_alike, when
from jaxspec.rows import LEAST, SPAN, TILE, Normaliser, slice_of, sum_rows, window

T = TypeVar("T")


@struct
class LogitNormaliser:
    """What one pass over a row of logits leaves behind.

    Attributes:
      peak: float32 [], the greatest logit.
      mass: float32 [], sum of exp((logit - peak) / temperature), at temperature 0 as at 1; not finite
        if any logit is NaN or +inf.
      greedy: int32 [], the lowest token whose logit is `peak`, looked for by greedy decoding only.
      floor: float32 [], the least logit that the filters keep; -inf where there are none.
    """

    peak: jax.Array  # []
    mass: jax.Array  # []
    greedy: jax.Array  # []
    floor: jax.Array  # []


@struct
class Logits:
    """Rows stored as logits, with the temperature they are sampled at.

    A row's law is softmax(logits / temperature). At temperature 0, and with top_k = 1, decoding is
    greedy: the law is exactly the point mass on the lowest token of greatest logit. Logits may be
    -inf (the token cannot occur); NaN, +inf and a row of nothing but -inf are bad values.

    Filters are applied in one order, temperature, top-k, top-p, and what they keep is normalised
    again: top-k keeps the k greatest logits, top-p of these the fewest greatest whose mass reaches
    p. Tokens of equal logit are kept or dropped together (but for top_k = 1), so that what is kept
    does not depend on the order of the vocabulary. The law that a verifier then reproduces is the
    filtered one.

    A temperature, top_k or top_p outside its range makes every row a bad one: no token, and
    `Status.NON_FINITE_ROW`.

    Attributes:
      values: float [R, V], logits in nats. Any float dtype; computed with in float32.
      temperature: float32 [], finite and at least 0; 0 for greedy.
      first: int32 [], index in `values` of this sequence's row 0. None means 0.
      top_k: int32 [], at least 1; V or more keeps all, and so do 0 and -1, which engines take for
        "off". None for no such filter.
      top_p: float32 [], in (0, 1]; 1 keeps all. None for no such filter.
    """

    values: jax.Array  # [R, V]
    temperature: jax.Array  # []
    first: jax.Array | None = None  # []
    top_k: jax.Array | None = None  # []
    top_p: jax.Array | None = None  # []

    @property
    def mass_tolerance(self) -> float:
        """No bound: any sum of exponentials is normalised."""
        return float("inf")

    @property
    def may_trust(self) -> bool:
        """False: a row must be read before one entry is known."""
        return False

    def visit(self, row: jax.Array, *, spans: bool) -> Normaliser:
        """Read the row once: its peak, its mass at this temperature, its greedy token."""

        def raw(start: Any, size: int) -> jax.Array:
            return slice_of(self, row, start, size).astype(jnp.float32)

        def weigh(
            start: Any, size: int, so_far: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            peak, mass = so_far
            piece = raw(start, size)
            new_peak = jnp.maximum(peak, jnp.max(piece))
            weights = self._exponential(piece, new_peak)
            width = TILE if size % TILE == 0 else size
            added = jnp.sum(sum_rows(weights.reshape(-1, width), spans=spans))
            return new_peak, mass * self._exponential(peak, new_peak) + added

        def lowest_at_peak(start: Any, size: int, so_far: jax.Array) -> jax.Array:
            tokens = start + jnp.arange(size, dtype=jnp.int32)
            at_peak = jnp.where(raw(start, size) == peak, tokens, self.values.shape[1])
            return jnp.minimum(so_far, jnp.min(at_peak))

        nothing = (jnp.float32(-jnp.inf), jnp.float32(0))
        peak, mass = self._scan(weigh, nothing, spans=spans)
        beyond = jnp.int32(self.values.shape[1])
        greedy = when(self._is_greedy(), lambda: self._scan(lowest_at_peak, beyond, spans=spans))
        floor = jnp.float32(-jnp.inf)
        if self.top_k is not None or self.top_p is not None:
            is_filtered = self._is_filtered() & jnp.isfinite(mass) & (mass > 0)
            whole = self.values.shape[1]
            found, kept = when(is_filtered, lambda: self._filter(raw(0, whole), peak))
            floor = jnp.where(is_filtered, found, floor)
            mass = jnp.where(is_filtered, kept, mass)
        # The logarithm of -1 is NaN, which no constant of the program is (`jax_debug_nans`).
        mass += jnp.log(jnp.where(self._is_in_range(), jnp.float32(1), jnp.float32(-1)))
        return LogitNormaliser(peak=peak, mass=mass, greedy=greedy, floor=floor)

    def mass(self, norm: Normaliser) -> jax.Array:
        """Return the sum of exponentials."""
        return norm.mass

    def _is_in_range(self) -> jax.Array:
        """Tell whether temperature and filters are such that a law is meant."""
        is_meant = (self.temperature >= 0) & (self.temperature < jnp.inf)
        if self.top_k is not None:
            is_meant &= self.top_k >= -1
        if self.top_p is not None:
            is_meant &= (self.top_p > 0) & (self.top_p <= 1)
        return is_meant

    def _is_filtered(self) -> jax.Array:
        """Tell whether a filter may drop a token."""
        by_rank = jnp.zeros((), bool)
        if self.top_k is not None:
            by_rank = (self.top_k > 0) & (self.top_k < self.values.shape[1])
        by_mass = jnp.zeros((), bool) if self.top_p is None else self.top_p < 1
        return (by_rank | by_mass) & ~self._is_greedy()

    def _filter(self, row: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (the least logit that the filters keep, the mass that they keep)."""
        falling = -jnp.sort(-row)
        weights = self._exponential(falling, peak)
        if self.top_k is not None:
            rank = jnp.where(self.top_k > 0, self.top_k, row.shape[0])
            last = jnp.minimum(rank, row.shape[0]) - 1
            weights = jnp.where(falling >= falling[last], weights, 0.0)
        floor = jnp.min(jnp.where(weights > 0, falling, jnp.inf))
        if self.top_p is not None:
            before = jnp.cumsum(weights) - weights
            wanted = self.top_p.astype(jnp.float32) * jnp.sum(weights)
            is_kept = (before < wanted) & (weights > 0)
            floor = jnp.min(jnp.where(is_kept, falling, jnp.inf))
        floor = jnp.minimum(floor, peak)  # rounding may not drop the most probable token
        return floor, jnp.sum(jnp.where(falling >= floor, weights, 0.0))

    def _scan(self, step: Callable[[Any, int, T], T], start: T, *, spans: bool) -> T:
        """Fold over the row: span by span, or all at once."""
        vocab = self.values.shape[1]
        span = min(SPAN * TILE, vocab) if spans else vocab
        trips, rest = divmod(vocab, span)
        # The state varies over a mesh as the rows do, or the token that is looked for in them.
        start, _ = varying_alike((start, (self.values, self.temperature, self.first)))
        state = fori_loop(trips, lambda trip, state: step(trip * span, span, state), start)
        return step(trips * span, rest, state) if rest else state

    def _is_greedy(self) -> jax.Array:
        """Tell whether decoding is greedy: top_k = 1, or a temperature too small to divide by."""
        is_cold = (self.temperature >= 0) & (self.temperature < LEAST)
        return is_cold if self.top_k is None else is_cold | (self.top_k == 1)

    def _exponential(self, logit: jax.Array, peak: jax.Array) -> jax.Array:
        """Return exp((logit - peak) / temperature); 0 for -inf, NaN stays NaN."""
        is_warm = (self.temperature >= LEAST) & (self.temperature < jnp.inf)
        temperature = jnp.where(is_warm, self.temperature, 1.0).astype(jnp.float32)
        # -inf - -inf would be NaN: a token that cannot occur has weight 0 whatever the peak.
        offset = logit - jnp.where(peak == -jnp.inf, 0.0, peak)
        scaled = jnp.where(logit == -jnp.inf, -jnp.inf, offset / temperature)
        # Of a NaN that it knows at compile time XLA makes any number on a CPU: exp(nan / x) is 0.
        return jnp.where(jnp.isnan(scaled), scaled, jnp.exp(scaled))

    def probability(self, raw: jax.Array, tokens: jax.Array, norm: Normaliser) -> jax.Array:
        """Turn logits of a visited row into probabilities.

        Bad values stay visible: the entries are NaN for a row with NaN or +inf in it and for a
        parameter outside its range; a row of nothing but -inf has no mass.
        """
        exact = raw.astype(jnp.float32)
        sampled = self._exponential(exact, norm.peak)
        if self.top_k is not None or self.top_p is not None:
            sampled = jnp.where(exact < norm.floor, 0.0, sampled)  # a NaN stays
        # Only a row of nothing but -inf has mass 0: its entries are then 0, not 0 / 0.
        sampled /= jnp.where(norm.mass == 0, 1.0, norm.mass)
        greedy = jnp.where((tokens == norm.greedy) & (norm.peak > -jnp.inf), 1.0, 0.0)
        # The peak may have lost a NaN: not every library that XLA calls keeps it. The mass has not.
        greedy += 0.0 * norm.mass
        return jnp.where(self._is_greedy(), greedy, sampled)

    def summand(self, raw: jax.Array, tokens: jax.Array, norm: Normaliser) -> jax.Array:
        """Return the probabilities."""
        return self.probability(raw, tokens, norm)

    def check(self, name: str, is_used: jax.Array) -> None:
        """Check the temperature and that used logits are finite or -inf, one at least finite."""
        temperature = self.temperature
        check_all(
            (temperature >= 0) & (temperature < jnp.inf),
            name + " temperature is {value}: it must be finite and at least 0",
            value=temperature,
        )
        if self.top_k is not None:
            message = name + " top_k is {value}: it must be at least 1, or 0 or -1 for no filter"
            check_all(self.top_k >= -1, message, value=self.top_k)
        if self.top_p is not None:
            message = name + " top_p is {value}: it must be above 0 and at most 1"
            check_all((self.top_p > 0) & (self.top_p <= 1), message, value=self.top_p)
        rows = window(self, is_used.shape[0]).astype(jnp.float32)
        check_all(
            ~is_used[:, None] | (rows < jnp.inf),
            name + " row {i0}: logit {i1} is {value}: only finite logits and -inf are allowed",
            value=rows,
        )
        peak = rows.max(axis=1)
        check_all(
            ~is_used | (peak > -jnp.inf),
            name + " row {i0}: every logit is -inf, so the row has no mass",
        )
