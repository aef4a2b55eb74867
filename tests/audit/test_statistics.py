"""The G-test: its statistic, its false alarms, and the power that it states."""

import math

import numpy as np
import pytest

from jaxspec import audit


def samples(generator, first, second, size):
    return generator.multinomial(size, first), generator.multinomial(size, second)


def test_g_and_its_correction_are_those_worked_out_by_hand():
    # 2 x 2, all four expected 50: G = 2 (120 ln 1.2 + 80 ln 0.8). Williams: rows and columns of
    # 100 each out of 200, so that q = 1 + (2 + 2 - 1) (2 + 2 - 1) / (6 * 200).
    by_hand = 2 * (120 * math.log(1.2) + 80 * math.log(0.8)) / (1 + 9 / 1200)
    found = audit.g_test([60, 40], [40, 60])
    assert found.statistic == pytest.approx(by_hand, rel=1e-12)
    assert (found.degrees, found.sizes) == (1, (100, 100))
    assert found.p_value == pytest.approx(math.erfc(math.sqrt(by_hand / 2)), rel=1e-12)


def test_the_fit_to_a_law_and_its_correction_are_those_worked_out_by_hand():
    # Expected 25 and 75. Williams, one sample: q = 1 + (1 / .25 + 1 / .75 - 1) / (6 * 100 * 1).
    raw = 2 * (35 * math.log(35 / 25) + 65 * math.log(65 / 75))
    found = audit.fit_test([35, 65], [0.25, 0.75])
    assert found.statistic == pytest.approx(raw / (1 + (4 + 4 / 3 - 1) / 600), rel=1e-12)
    assert (found.degrees, found.sizes) == (1, (100, 0))


def test_samples_of_unequal_sizes_and_equal_proportions_do_not_differ():
    found = audit.g_test([10, 20, 30], [30, 60, 90])
    assert found.statistic == pytest.approx(0, abs=1e-12)
    assert found.p_value == pytest.approx(1)
    assert (found.degrees, found.sizes) == (2, (60, 180))


def test_the_least_detectable_difference_follows_from_the_tables_of_power():
    for outcomes, level, power, noncentrality in (
        (2, 0.05, 0.8, 7.849),
        (2, 0.05, 0.9, 10.507),
        (3, 0.05, 0.8, 9.635),
        (11, 0.05, 0.8, 16.241),
        (2, 0.01, 0.8, 11.679),
    ):
        counts = np.full(outcomes, 500)
        size = counts.sum()
        two = audit.g_test(counts, counts, level=level, power=power)
        assert two.detectable == pytest.approx(math.sqrt(noncentrality / (2 * size)), rel=1e-3)
        one = audit.fit_test(counts, counts / size, level=level, power=power)
        assert one.detectable == pytest.approx(math.sqrt(noncentrality / (4 * size)), rel=1e-3)
        assert (one.level, one.power) == (level, power)


@pytest.mark.parametrize("num_outcomes", [3, 60], ids=["all common", "many rare"])
def test_p_values_are_uniform_if_the_law_is_the_same(num_outcomes):
    generator = np.random.default_rng(1)
    law = 1 / np.arange(1, num_outcomes + 1)
    law /= law.sum()
    pairs = [samples(generator, law, law, 200) for _ in range(600)]
    p_values = [audit.g_test(*pair, level=0.05, power=0.5).p_value for pair in pairs]
    for level in (0.05, 0.25, 0.5, 0.75):
        error = math.sqrt(level * (1 - level) / 600)
        assert abs(np.mean(np.less_equal(p_values, level)) - level) <= 3 * error


def test_samples_of_the_law_are_rejected_as_often_as_the_level_says():
    generator = np.random.default_rng(5)
    law = generator.dirichlet(np.full(30, 0.3))
    rejected = sum(
        audit.fit_test(generator.multinomial(2000, law), law).p_value < 0.05 for _ in range(600)
    )
    assert 12 <= rejected <= 52  # 30 +- 5.3


@pytest.mark.parametrize("num_outcomes", [2, 8])
def test_a_difference_of_the_stated_size_is_found_as_often_as_stated(num_outcomes):
    # The hardest law for a total variation t: uniform, half the outcomes up and half down.
    generator = np.random.default_rng(2)
    law = np.full(num_outcomes, 1 / num_outcomes)
    stated = audit.g_test(*samples(generator, law, law, 400), level=0.01, power=0.9)
    shift = stated.detectable / num_outcomes * np.where(np.arange(num_outcomes) % 2, 1, -1)
    found = [
        audit.g_test(*samples(generator, law + shift, law - shift, 400), level=0.01).p_value <= 0.01
        for _ in range(200)
    ]
    assert stated.detectable < 0.25
    # The two laws are 2 * sum|shift| / 2 = detectable apart, each half-way from the mean.
    assert np.mean(found) >= 0.9 - 3 * math.sqrt(0.9 * 0.1 / 200)
    assert np.mean(found) < 1


def test_a_sample_off_an_exact_law_by_the_stated_size_is_found():
    generator = np.random.default_rng(6)
    law = np.full(20, 0.05)
    size = 20_000
    least = audit.fit_test(generator.multinomial(size, law), law).detectable
    other = law + np.where(np.arange(20) < 10, 1, -1) * least / 10
    found = [audit.fit_test(generator.multinomial(size, other), law) for _ in range(60)]
    assert sum(each.p_value < 1e-3 for each in found) >= 45  # 54 expected


def test_rare_outcomes_are_pooled_and_a_rare_pool_takes_in_the_next_rarest():
    # Expected 4 each in the smaller sample: three rare ones, pooled to 12; then nothing differs.
    found = audit.g_test([40, 40, 4, 8, 0], [40, 40, 4, 0, 8])
    assert found.degrees == 2
    assert found.p_value == pytest.approx(1)
    lone = audit.g_test([40, 30, 2], [40, 30, 2])  # 2 is rare: with the 30
    assert lone.degrees == 1
    moved = audit.g_test([40, 30, 2], [40, 2, 30])  # none is rare
    assert moved.degrees == 2
    assert moved.p_value < 1e-6


def test_outcomes_that_never_occurred_and_the_order_change_nothing():
    assert audit.g_test([60, 0, 40, 0], [40, 0, 60, 0]) == audit.g_test([60, 40], [40, 60])
    one = audit.g_test([50, 30, 20], [20, 40, 50])
    other = audit.g_test([50, 20, 40], [20, 50, 30])
    assert other.statistic == pytest.approx(one.statistic)
    assert other.detectable == pytest.approx(one.detectable)


def test_samples_that_can_show_nothing_claim_no_power():
    # One outcome; all rare; one run each; one outcome that occurred.
    for first, second in (
        ([100], [100]),
        ([2, 1, 1], [1, 2, 1]),
        ([1, 0], [0, 1]),
        ([100, 0], [100, 0]),
    ):
        found = audit.g_test(first, second)
        assert (found.statistic, found.degrees, found.p_value) == (0.0, 0, 1.0)
        assert found.detectable is None
    too_small = audit.g_test([6, 6], [6, 6], power=0.99)
    assert (too_small.degrees, too_small.detectable) == (1, None)


def test_disjoint_samples_are_found_and_a_large_statistic_is_finite():
    found = audit.g_test([50, 0], [0, 50])
    assert found.p_value < 1e-12
    assert found.detectable < 1
    large = audit.g_test([10**6, 0], [0, 10**6])
    assert large.p_value == 0.0
    assert math.isfinite(large.statistic)


def test_an_outcome_that_the_law_excludes_decides_it():
    found = audit.fit_test([50, 50, 1], [0.5, 0.5, 0.0])
    assert (found.p_value, found.statistic) == (0.0, math.inf)
    assert audit.fit_test([50, 50, 0], [0.5, 0.5, 0.0]).p_value > 0.9


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([], [], "first is empty"),
        ([1], [], "second is empty"),
        ([1, 2], [1, 2, 3], "counts of 2 outcomes and of 3"),
        ([1, 2], [1, -2], "second has a negative count: -2"),
        ([0, 0], [1, 2], "first has no counts above 0"),
        ([0.5, 1.5], [1, 2], "first must be a list of integers"),
        ([[1, 2]], [[1, 2]], "first must be a list"),
    ],
)
def test_invalid_counts_are_an_error(first, second, message):
    with pytest.raises(ValueError, match=message):
        audit.g_test(first, second)


@pytest.mark.parametrize(
    ("counts", "law", "message"),
    [
        ([], [], "counts is empty"),
        ([1, 2], [0.5, 0.25, 0.25], "the law must be 2 probabilities"),
        ([1, 2], [0.5, 0.4], "of mass 1"),
        ([1, 2], [1.5, -0.5], "the law must be"),
    ],
)
def test_an_invalid_law_is_an_error(counts, law, message):
    with pytest.raises(ValueError, match=message):
        audit.fit_test(counts, law)


def test_a_level_or_power_out_of_range_is_an_error():
    for level, power in ((0.0, 0.9), (0.1, 1.0), (0.5, 0.5)):
        with pytest.raises(ValueError, match="0 < level < power < 1"):
            audit.g_test([50, 50], [50, 50], level=level, power=power)
