"""G-tests, for laws that cannot be counted exactly: every result states its power."""

import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

T = TypeVar("T", bound=Hashable)

_LEAST_EXPECTED = 5.0


@dataclasses.dataclass(frozen=True)
class GTest:
    """Result of a G-test.

    Attributes:
      statistic: G = 2 sum observed log(observed / expected), divided by Williams' correction.
      degrees: degrees of freedom, outcomes after pooling less one.
      p_value: probability of a G at least as great if the laws are the same.
      sizes: the sizes of the two samples; the second is 0 for an exact law.
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
    first: ArrayLike, second: ArrayLike, *, level: float = 1e-3, power: float = 0.9
) -> GTest:
    """Test whether two samples of counts have one law.

    Outcomes expected fewer than 5 times in either sample are pooled, together with the next rarest
    if need be. Without Williams' correction false alarms at level 1e-3 would be up to twice as
    frequent as stated. The stated power holds for any alternative: a difference d of total variation
    t has sum d^2 / p >= (2 t)^2, so the noncentrality is at least 4 t^2 n m / (n + m).

    Args:
      first: int [K], counts of outcomes.
      second: int [K], counts of the same outcomes.
      level: probability of a false alarm to state the power at, in (0, 1).
      power: probability of detection to state it for, in (0, 1), above `level`.

    Returns:
      The `GTest`. With fewer than two outcomes after pooling, p is 1 and `detectable` is None.

    Raises:
      ValueError: the counts are not integers, negative, or of different outcomes; a sample is empty;
        or the level or the power is out of range.

    References:
      Williams, "Improved likelihood ratio tests for complete contingency tables", Biometrika 63,
      1976. Power: Cohen, "Statistical Power Analysis for the Behavioral Sciences", 2nd ed. 1988,
      chapter 7.

    >>> test = g_test([60, 40], [40, 60])
    >>> round(test.statistic, 3), test.degrees, round(test.p_value, 4), round(test.detectable, 2)
    (7.994, 1, 0.0047, 0.32)
    """
    samples = [_counts("first", first), _counts("second", second)]
    if len(samples[0]) != len(samples[1]):
        raise ValueError(f"counts of {len(samples[0])} outcomes and of {len(samples[1])}")
    counts = np.stack(samples)
    n, m = (int(size) for size in counts.sum(axis=1))
    _check_power(level, power)
    rarest_first = counts[:, np.argsort(counts.sum(axis=0), kind="stable")]
    pooled = _pool(rarest_first, rarest_first.sum(axis=0) * (min(n, m) / (n + m)))
    pooled = pooled[:, pooled.sum(axis=0) > 0]
    totals, degrees = pooled.sum(axis=0), pooled.shape[1] - 1
    expected = np.array([[n], [m]]) * totals / (n + m)
    spread = ((n + m) * (1 / n + 1 / m) - 1) * ((n + m) * np.sum(1 / totals) - 1)
    correction = 1 + float(spread) / (6 * (n + m) * max(degrees, 1))
    return _test(pooled, expected, correction, (n, m), level, power)


def fit_test(
    counts: ArrayLike, law: ArrayLike, *, level: float = 1e-3, power: float = 0.9
) -> GTest:
    """Test whether a sample has a law that is known exactly, float [K]; otherwise as `g_test`.

    An outcome that the law excludes and the sample has decides it: G is infinite and p is 0.

    Raises:
      ValueError: as `g_test`, or the law is not one of as many outcomes.

    >>> test = fit_test([60, 40], [0.5, 0.5])
    >>> round(test.statistic, 3), round(test.p_value, 4)
    (4.007, 0.0453)
    """
    seen, exact = _counts("counts", counts), np.asarray(law, np.float64)
    is_law = exact.shape == seen.shape and exact.min() >= 0 and abs(exact.sum() - 1) <= 1e-5
    if not is_law:
        raise ValueError(f"the law must be {len(seen)} probabilities of mass 1, got {law!r}")
    _check_power(level, power)
    size = int(seen.sum())
    order = np.argsort(exact)
    seen, exact = seen[order], exact[order] / exact.sum()
    if seen[exact == 0].any():
        return GTest(math.inf, len(seen) - 1, 0.0, (size, 0), None, level, power)
    observed, shares = _pool(np.stack([seen, exact]), size * exact)
    degrees = len(shares) - 1
    correction = 1 + (float(np.sum(1 / shares)) - 1) / (6 * size * max(degrees, 1))
    return _test(observed, size * shares, correction, (size, 0), level, power)


def total_variation(first: Mapping[T, float], second: Mapping[T, float]) -> float:
    """Return the total variation between two laws, or measures, by outcome."""
    outcomes = {*first, *second}
    return sum(abs(first.get(each, 0.0) - second.get(each, 0.0)) for each in outcomes) / 2


def _counts(name: str, counts: ArrayLike) -> np.ndarray:
    given = np.asarray(counts)
    if given.size == 0:
        raise ValueError(f"{name} is empty: a test needs the counts of at least one outcome")
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a list of integers, got {counts!r}")
    if given.min() < 0:
        raise ValueError(f"{name} has a negative count: {given.min()}")
    if not given.any():
        raise ValueError(f"{name} has no counts above 0: the sample is empty")
    return given.astype(np.int64)


def _check_power(level: float, power: float) -> None:
    if not 0 < level < power < 1:
        raise ValueError(f"level is {level}, power is {power}: must satisfy 0 < level < power < 1")


def _pool(columns: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Add up the rarest outcomes, listed first, until each is expected often enough."""
    rare = int(np.sum(expected < _LEAST_EXPECTED))
    while 0 < rare < len(expected) and expected[:rare].sum() < _LEAST_EXPECTED:
        rare += 1
    pool = columns[:, :rare].sum(axis=1, keepdims=True)
    return np.concatenate([pool, columns[:, rare:]], axis=1) if rare else columns


def _test(
    observed: np.ndarray,
    expected: np.ndarray,
    correction: float,
    sizes: tuple[int, int],
    level: float,
    power: float,
) -> GTest:
    from scipy import special  # half a second to import

    degrees = observed.shape[-1] - 1
    if degrees < 1:
        return GTest(0.0, 0, 1.0, sizes, None, level, power)
    ratios = np.log(np.where(observed > 0, observed, 1) / np.where(observed > 0, expected, 1))
    statistic = max(0.0, float(2 * np.sum(observed * ratios))) / correction
    # The noncentrality at which chi-squared exceeds its `level` quantile with probability `power`.
    noncentrality = float(special.chndtrinc(special.chdtri(degrees, level), degrees, 1 - power))
    (n, m), tail = sizes, float(special.chdtrc(degrees, statistic))
    distance = math.sqrt(noncentrality / (4 * (n * m / (n + m) if m else n)))
    detectable = distance if distance <= 1 else None
    return GTest(statistic, degrees, tail, sizes, detectable, level, power)
