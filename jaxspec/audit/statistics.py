"""Statistics, for what cannot be counted exactly: are two samples of one law?

A test that is not told what it could have seen proves nothing, so each result states its power: the
least total variation that it would have found.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.scipy.stats import chi2

LEAST_EXPECTED = 5.0
"""Outcomes expected fewer times than this in either sample are pooled."""


@dataclasses.dataclass(frozen=True)
class GTest:
    """Result of a two-sample G-test.

    Attributes:
      statistic: G = 2 sum observed log(observed / expected).
      degrees: degrees of freedom, outcomes after pooling less one.
      p_value: probability of a G at least as great if both samples have one law.
      sizes: the sizes of the two samples.
      detectable: a difference in law of at least this total variation between pooled outcomes is
        found, at the level `level`, with probability at least `power`.
      level: probability of a false alarm that `detectable` is for.
      power: see `detectable`.
    """

    statistic: float
    degrees: int
    p_value: float
    sizes: tuple[int, int]
    detectable: float
    level: float
    power: float


def g_test(
    first: np.ndarray, second: np.ndarray, *, level: float = 1e-3, power: float = 0.9
) -> GTest:
    """Test whether two samples of counts have one law.

    The stated power holds for any alternative: a difference d of total variation t has
    sum d^2 / p >= (2 t)^2, so the noncentrality is at least 4 t^2 n m / (n + m).

    Args:
      first: int [K], counts of outcomes.
      second: int [K], counts of the same outcomes.
      level: probability of a false alarm to state the power at.
      power: probability of detection to state it for.

    Returns:
      The `GTest`. With fewer than two outcomes left after pooling nothing can be told: p is 1 and
      `detectable` is 1.

    Raises:
      ValueError: the counts are not of the same outcomes, negative, or a sample is empty.

    References:
      Sokal and Rohlf, "Biometry", 3rd ed. 1995, chapter 17. Power: Cohen, "Statistical Power Analysis
      for the Behavioral Sciences", 2nd ed. 1988, chapter 7.
    """
    counts = np.stack([np.asarray(first, np.int64), np.asarray(second, np.int64)])
    if counts.ndim != 2 or counts.min(initial=0) < 0:
        raise ValueError(f"counts must be two lists of non-negative integers, got {counts}")
    sizes = counts.sum(axis=1)
    if sizes.min() == 0:
        raise ValueError(f"a sample is empty: sizes are {sizes.tolist()}")
    expected = counts.sum(axis=0) * (sizes.min() / sizes.sum())
    is_rare = expected < LEAST_EXPECTED
    pooled = np.concatenate(
        [counts[:, ~is_rare], counts[:, is_rare].sum(axis=1, keepdims=True)], axis=1
    )
    pooled = pooled[:, pooled.sum(axis=0) > 0]
    degrees = pooled.shape[1] - 1
    first_size, second_size = (int(size) for size in sizes)
    if degrees < 1:
        return GTest(0.0, 0, 1.0, (first_size, second_size), 1.0, level, power)
    fitted = sizes[:, None] * pooled.sum(axis=0) / sizes.sum()
    ratios = np.log(np.where(pooled > 0, pooled, 1) / np.where(pooled > 0, fitted, 1))
    statistic = float(2 * np.sum(pooled * ratios))
    harmonic = first_size * second_size / (first_size + second_size)
    return GTest(
        statistic=statistic,
        degrees=degrees,
        p_value=float(chi2.sf(statistic, degrees)),
        sizes=(first_size, second_size),
        detectable=min(1.0, float(np.sqrt(_noncentrality(degrees, level, power) / 4 / harmonic))),
        level=level,
        power=power,
    )


def _noncentrality(degrees: int, level: float, power: float) -> float:
    """Return the noncentrality at which chi-squared exceeds its `level` quantile often enough."""

    def exceeds(noncentrality: float, threshold: float) -> float:
        # A noncentral chi-squared is a Poisson mixture of central ones.
        terms = np.arange(int(noncentrality / 2 + 12 * np.sqrt(noncentrality + 1) + 40))
        logs = terms * np.log(max(noncentrality, 1e-12) / 2) - noncentrality / 2
        weights = np.exp(logs - np.cumsum(np.log(np.maximum(terms, 1))))
        tails = np.asarray(jax.vmap(lambda k: chi2.sf(threshold, degrees + 2 * k))(terms * 1.0))
        return float(np.sum(weights * tails))

    threshold = _bisect(lambda x: float(chi2.sf(x, degrees)) <= level, 1.0)
    return _bisect(lambda value: exceeds(value, threshold) >= power, 1.0)


def _bisect(holds: Callable[[float], bool], high: float) -> float:
    """Return the least value, to 1e-3 of it, from which on a monotone condition holds."""
    low = 0.0
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
