"""Statistics, for what cannot be counted exactly: are two samples of one law?

A test that is not told what it could have seen proves nothing, so each result states its power: the
least total variation that it would have found.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

LEAST_EXPECTED = 5.0
"""Outcomes expected fewer times than this in either sample are pooled."""


@dataclasses.dataclass(frozen=True)
class GTest:
    """Result of a two-sample G-test.

    Attributes:
      statistic: G = 2 sum observed log(observed / expected), over Williams' correction.
      degrees: degrees of freedom, outcomes after pooling less one.
      p_value: probability of a G at least as great if both samples have one law.
      sizes: the sizes of the two samples.
      detectable: a difference in law of at least this total variation between pooled outcomes is
        found, at the level `level`, with probability at least `power`; None if the samples are too
        small for any.
      level: probability of a false alarm that `detectable` is for.
      power: see `detectable`.
    """

    statistic: float
    degrees: int
    p_value: float
    sizes: tuple[int, int]
    detectable: float | None
    level: float
    power: float


def g_test(
    first: np.ndarray, second: np.ndarray, *, level: float = 1e-3, power: float = 0.9
) -> GTest:
    """Test whether two samples of counts have one law.

    Outcomes expected fewer than `LEAST_EXPECTED` times in either sample are pooled, with the next
    rarest if need be. Without Williams' correction false alarms at level 1e-3 would come up to twice
    as often as stated.

    The stated power holds for any alternative: a difference d of total variation t has
    sum d^2 / p >= (2 t)^2, so the noncentrality is at least 4 t^2 n m / (n + m).

    Args:
      first: int [K], counts of outcomes.
      second: int [K], counts of the same outcomes.
      level: probability of a false alarm to state the power at, in (0, 1).
      power: probability of detection to state it for, in (0, 1), above `level`.

    Returns:
      The `GTest`. With fewer than two outcomes left after pooling nothing can be told: p is 1 and
      `detectable` is None.

    Raises:
      ValueError: the counts are not of the same outcomes, not whole, or negative; a sample is empty;
        or the level or the power is none.

    References:
      Williams, "Improved likelihood ratio tests for complete contingency tables", Biometrika 63,
      1976. Power: Cohen, "Statistical Power Analysis for the Behavioral Sciences", 2nd ed. 1988,
      chapter 7.

    >>> test = g_test([60, 40], [40, 60])
    >>> round(test.statistic, 3), test.degrees, round(test.p_value, 4), round(test.detectable, 2)
    (7.994, 1, 0.0047, 0.32)
    """
    given = [np.asarray(first), np.asarray(second)]
    for name, each in zip(("first", "second"), given, strict=True):
        if each.size == 0:
            raise ValueError(f"{name} is empty: a test needs the counts of at least one outcome")
    if any(each.ndim != 1 or each.dtype.kind not in "iu" for each in given):
        raise ValueError(f"counts must be two lists of whole numbers, got {first} and {second}")
    if len(given[0]) != len(given[1]):
        raise ValueError(f"counts of {len(given[0])} outcomes and of {len(given[1])}")
    counts = np.stack(given).astype(np.int64)
    if counts.min(initial=0) < 0:
        raise ValueError(f"a count is negative: {counts.min()}")
    sizes = counts.sum(axis=1)
    if sizes.min() == 0:
        raise ValueError(f"a sample is empty: sizes are {sizes.tolist()}")
    if not 0 < level < power < 1:
        raise ValueError(f"level is {level}, power is {power}: must satisfy 0 < level < power < 1")
    pooled = _pool_rare(counts, sizes)
    degrees = pooled.shape[1] - 1
    n, m = (int(size) for size in sizes)
    if degrees < 1:
        return GTest(0.0, 0, 1.0, (n, m), None, level, power)
    totals = pooled.sum(axis=0)
    fitted = sizes[:, None] * totals / sizes.sum()
    ratios = np.log(np.where(pooled > 0, pooled, 1) / np.where(pooled > 0, fitted, 1))
    spread = ((n + m) * (1 / n + 1 / m) - 1) * ((n + m) * np.sum(1 / totals) - 1)
    correction = 1 + float(spread) / (6 * (n + m) * degrees)
    statistic = max(0.0, float(2 * np.sum(pooled * ratios))) / correction
    detectable = math.sqrt(_noncentrality(degrees, level, power) * (n + m) / (4 * n * m))
    return GTest(
        statistic=statistic,
        degrees=degrees,
        p_value=_tail(statistic, degrees),
        sizes=(n, m),
        detectable=detectable if detectable <= 1 else None,
        level=level,
        power=power,
    )


def fit_test(
    counts: np.ndarray, law: np.ndarray, *, level: float = 1e-3, power: float = 0.9
) -> GTest:
    """Test whether a sample has a law that is known exactly.

    As `g_test`, with the expected counts those of the law: outcomes expected fewer than
    `LEAST_EXPECTED` times are pooled. An outcome that the law excludes and the sample has settles it:
    G is infinite and p is 0.

    Args:
      counts: int [K], counts of outcomes.
      law: float [K], their probabilities.
      level: probability of a false alarm to state the power at, in (0, 1).
      power: probability of detection to state it for, in (0, 1), above `level`.

    Returns:
      The `GTest`; its second size is 0, for no sample.

    Raises:
      ValueError: the counts are not whole, or negative, or none; the law is not one of as many
        outcomes; or the level or the power is none.

    >>> test = fit_test([60, 40], [0.5, 0.5])
    >>> round(test.statistic, 3), round(test.p_value, 4)
    (4.007, 0.0453)
    """
    seen, exact = np.asarray(counts), np.asarray(law, np.float64)
    if seen.size == 0:
        raise ValueError("counts is empty: a test needs the counts of at least one outcome")
    if seen.ndim != 1 or seen.dtype.kind not in "iu" or seen.min(initial=0) < 0 or not seen.sum():
        raise ValueError(f"counts must be a list of whole numbers, not all 0, got {counts}")
    is_law = exact.shape == seen.shape and exact.min() >= 0 and abs(exact.sum() - 1) <= 1e-5
    if not is_law:
        raise ValueError(f"the law must be {len(seen)} probabilities of mass 1, got {law}")
    if not 0 < level < power < 1:
        raise ValueError(f"level is {level}, power is {power}: must satisfy 0 < level < power < 1")
    size = int(seen.sum())
    order = np.argsort(exact)
    seen, exact = seen[order].astype(np.int64), exact[order] / exact.sum()
    if seen[exact == 0].any():
        return GTest(math.inf, len(seen) - 1, 0.0, (size, 0), None, level, power)
    # The rarest outcomes go together until they are expected often enough.
    rare = int(np.searchsorted(size * exact, LEAST_EXPECTED))
    while 0 < rare < len(exact) and size * exact[:rare].sum() < LEAST_EXPECTED:
        rare += 1
    if rare:
        seen = np.concatenate([[seen[:rare].sum()], seen[rare:]])
        exact = np.concatenate([[exact[:rare].sum()], exact[rare:]])
    degrees = len(exact) - 1
    if degrees < 1:
        return GTest(0.0, 0, 1.0, (size, 0), None, level, power)
    ratios = np.log(np.where(seen > 0, seen, 1) / np.where(seen > 0, size * exact, 1))
    correction = 1 + (float(np.sum(1 / exact)) - 1) / (6 * size * degrees)
    statistic = max(0.0, float(2 * np.sum(seen * ratios))) / correction
    detectable = math.sqrt(_noncentrality(degrees, level, power) / (4 * size))
    return GTest(
        statistic=statistic,
        degrees=degrees,
        p_value=_tail(statistic, degrees),
        sizes=(size, 0),
        detectable=detectable if detectable <= 1 else None,
        level=level,
        power=power,
    )


def _pool_rare(counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Pool the rarest outcomes until each column is expected often enough in both samples."""
    rarest_first = counts[:, np.argsort(counts.sum(axis=0), kind="stable")]
    expected = rarest_first.sum(axis=0) * (sizes.min() / sizes.sum())
    num_pooled = int(np.sum(expected < LEAST_EXPECTED))
    while num_pooled and expected[:num_pooled].sum() < LEAST_EXPECTED < expected.sum():
        num_pooled += 1
    pool = rarest_first[:, :num_pooled].sum(axis=1, keepdims=True)
    columns = np.concatenate([pool, rarest_first[:, num_pooled:]], axis=1)
    return columns[:, columns.sum(axis=0) > 0]


def _tails(threshold: float, degrees: int, count: int) -> np.ndarray:
    """Return P(chi-squared > threshold) for degrees, degrees + 2, ..., `count` of them.

    Two degrees more add (x / 2)^(k / 2) exp(-x / 2) / Gamma(k / 2 + 1) to the tail of k.
    """
    half = threshold / 2
    if half <= 0:
        return np.ones(count)
    is_odd = degrees % 2
    tail = math.erfc(math.sqrt(half)) if is_odd else math.exp(-half)
    skipped = (degrees - 1) // 2
    steps = np.arange(skipped + count - 1) + (0.5 if is_odd else 1.0)
    gammas = np.array([math.lgamma(step + 1) for step in steps.tolist()])
    added = np.exp(steps * math.log(half) - half - gammas)
    return np.minimum(1.0, tail + np.cumsum(np.concatenate([[0.0], added])))[skipped:]


def _tail(threshold: float, degrees: int) -> float:
    return float(_tails(threshold, degrees, 1)[0])


def _noncentrality(degrees: int, level: float, power: float) -> float:
    """Return the noncentrality at which chi-squared exceeds its `level` quantile often enough."""
    threshold = _bisect(lambda x: _tail(x, degrees) <= level)

    def exceeds(noncentrality: float) -> float:
        # A noncentral chi-squared is a Poisson mixture of central ones.
        mean = noncentrality / 2
        terms = np.arange(int(mean + 12 * math.sqrt(mean + 1) + 40))
        logs = terms * math.log(mean) - mean - [math.lgamma(term + 1) for term in terms.tolist()]
        return float(np.sum(np.exp(logs) * _tails(threshold, degrees, len(terms))))

    return _bisect(lambda value: exceeds(value) >= power)


def _bisect(holds: Callable[[float], bool]) -> float:
    """Return the least positive value, to 1e-6 of it, from which on a monotone condition holds."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
