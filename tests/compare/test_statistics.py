"""Means, differences and ratios: against published numbers, by hand, and against SciPy's own tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from runner.compare.statistics import (
    BOOTSTRAP_FROM,
    bootstrap_interval,
    deviation,
    difference,
    mean,
    mean_of,
    modified_z,
    paired,
    speed_up,
    t_quantile,
    welch,
)

# Student's sleep data (Cushny & Peebles 1905, in Student 1908): extra hours of sleep of ten patients under two drugs.
FIRST = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SECOND = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def by_seed(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values))


def test_paired_interval_of_the_sleep_data() -> None:
    """R's `t.test(extra ~ group, paired = TRUE)`: mean −1.58, t = −4.0621, df 9, 95% from −2.4598858 to −0.7001142."""
    estimate = difference(by_seed(FIRST), by_seed(SECOND))
    interval = estimate.interval(0.95)
    assert interval is not None
    assert estimate.standard_error is not None
    assert (estimate.how, estimate.df) == ("paired", 9)
    assert estimate.value == pytest.approx(-1.58)
    assert estimate.value / estimate.standard_error == pytest.approx(-4.0621, abs=5e-5)
    assert (interval.low, interval.high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)


def test_welch_interval_of_the_sleep_data() -> None:
    """R's `t.test(extra ~ group)`: t = −1.8608, df 17.776, 95% from −3.3654832 to 0.2054832."""
    estimate = welch(FIRST, SECOND)
    interval = estimate.interval(0.95)
    assert interval is not None
    assert estimate.standard_error is not None
    assert estimate.df == pytest.approx(17.776, abs=5e-4)
    assert estimate.value / estimate.standard_error == pytest.approx(-1.8608, abs=5e-5)
    assert (interval.low, interval.high) == pytest.approx((-3.3654832, 0.2054832), abs=1e-7)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 5), (7, 4)])
def test_welch_is_scipys(sizes: tuple[int, int]) -> None:
    """Unequal sizes and spreads: the same interval as SciPy's Welch test, at both levels that are used."""
    draw = np.random.default_rng(sum(sizes))
    a, b = draw.normal(3, 1, sizes[0]), draw.normal(2, 5, sizes[1])
    for level in (0.90, 0.95):
        interval = welch(list(a), list(b)).interval(level)
        expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(level)
        assert interval is not None
        assert (interval.low, interval.high) == pytest.approx(tuple(expected))


def test_mean_by_hand() -> None:
    """1, 2, 6: mean 3, variance 7, and a half-width of 4.30265 · √(7/3), Student's table at 2 degrees of freedom."""
    interval = mean_of([1.0, 2.0, 6.0]).interval(0.95)
    assert interval is not None
    assert deviation([1.0, 2.0, 6.0]) == pytest.approx(math.sqrt(7))
    assert interval.half_width == pytest.approx(4.30265 * math.sqrt(7 / 3), rel=1e-5)
    assert t_quantile(0.90, 2) == pytest.approx(2.9200, abs=5e-5)


def test_two_common_seeds_make_a_pair_and_one_does_not() -> None:
    """The rule looks at the seeds alone: from two common ones on only pairs count; below, all values do, unpaired."""
    baseline = {0: 1.0, 1: 2.0, 2: 99.0}
    two = difference({0: 2.0, 1: 4.0, 7: -50.0}, baseline)
    assert (two.how, two.value, two.sizes) == ("paired", 1.5, (2, 2))
    one = difference({0: 2.0, 8: 4.0}, {0: 1.0, 1: 2.0})
    assert (one.how, one.value, one.sizes) == ("Welch", 1.5, (2, 2))


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0]), ([1.0], [2.0, 3.0])])
def test_no_interval_with_fewer_than_two(a: list[float], b: list[float]) -> None:
    """One value on a side: a difference, and no interval at all."""
    estimate = welch(a, b)
    assert estimate.interval(0.95) is None
    assert estimate.value == pytest.approx(a[0] - sum(b) / len(b))


def test_equal_values_have_no_spread_at_all() -> None:
    """0.1 three times has a standard deviation of 0 exactly, though its mean in floating point is not 0.1."""
    assert deviation([0.1, 0.1, 0.1]) == 0.0
    interval = paired([0.1, 0.1, 0.1]).interval(0.95)
    assert interval is not None
    assert interval.low == interval.high
    constant = welch([2.0, 2.0], [1.0, 1.0]).interval(0.95)
    assert constant is not None
    assert (constant.low, constant.high) == (1.0, 1.0)


def test_speed_up_is_a_geometric_mean() -> None:
    """2× and 8× are 4× on average; the interval is t's on the log scale, so its ends multiply to 16."""
    result = speed_up({0: 50.0, 1: 10.0}, {0: 100.0, 1: 80.0})
    assert result.value == pytest.approx(4.0)
    assert result.interval is not None
    assert result.interval.low * result.interval.high == pytest.approx(16.0)
    half = t_quantile(0.95, 1) * math.log(4) / 2  # sd of log 2 and log 8 is log 4 ÷ √2, and two pairs
    assert math.log(result.interval.high / 4) == pytest.approx(half)


def test_speed_up_without_pairs() -> None:
    """No common seed: Welch's on the logs, with the same point."""
    result = speed_up({5: 50.0, 6: 50.0}, {0: 100.0, 1: 100.0})
    assert result.value == pytest.approx(2.0)
    assert result.interval is not None
    assert speed_up({0: 50.0}, {0: 100.0}).interval is None


def test_bootstrap_is_scipys_bca_and_repeats() -> None:
    """Ten pairs: BCa's interval, the same at every call; nine pairs or equal values: none."""
    values = [float(v) for v in np.random.default_rng(1).exponential(1, BOOTSTRAP_FROM)]
    interval = bootstrap_interval(values, 0.9)
    expected = stats.bootstrap((values,), np.mean, confidence_level=0.9, method="BCa", rng=0).confidence_interval
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx(tuple(expected))
    assert bootstrap_interval(values, 0.9) == interval
    assert bootstrap_interval(values[1:], 0.9) is None
    assert bootstrap_interval([1.0] * BOOTSTRAP_FROM, 0.9) is None


def test_modified_z_by_hand() -> None:
    """Ten values with a median of 2.45 and a MAD of 0.15: the formula of Iglewicz & Hoaglin (1993), section 3."""
    values = [2.1, 2.6, 2.4, 2.5, 2.3, 2.1, 2.3, 2.6, 8.2, 8.3]
    scores = modified_z(values)
    assert scores[8:] == pytest.approx([0.6745 * 5.75 / 0.15, 0.6745 * 5.85 / 0.15])
    assert max(map(abs, scores[:8])) < 3.5


def test_modified_z_where_most_values_are_equal() -> None:
    """A MAD of 0: what is equal to the median is not off, all else is infinitely far off."""
    assert modified_z([1.0, 1.0, 1.0, 2.0, 0.0]) == [0.0, 0.0, 0.0, math.inf, -math.inf]


HUGE = [30.0, 1e200, 1e300]


@pytest.mark.parametrize("scale", [1e-200, 1e-90, 1.0, 1e90, 1e200])
def test_no_square_is_too_large_or_too_small(scale: float) -> None:
    """Metrics of any size, such as a diverged perplexity, have the spread of usual ones, in their own units."""
    usual, other = [80.0, 80.4, 80.3], [79.0, 80.9, 80.1, 82.0]
    scaled, beside = ([scale * value for value in values] for values in (usual, other))
    assert deviation(scaled) == pytest.approx(scale * deviation(usual))
    for estimate, expected in ((paired(scaled), paired(usual)), (welch(scaled, beside), welch(usual, other))):
        assert estimate.df == pytest.approx(expected.df)
        assert estimate.standard_error == pytest.approx(scale * (expected.standard_error or 0.0))


@pytest.mark.parametrize("values", [[math.inf, 30.0], [30.0, math.nan], [-math.inf, math.inf], [1e308] * 11])
def test_what_has_no_mean(values: list[float]) -> None:
    """An infinite value, one that is no number, and values that are too large together: no number, and no error."""
    assert math.isnan(mean(values))
    assert math.isnan(mean_of(values).value)
    assert math.isnan(welch(values, [1.0, 2.0]).value)
    assert math.isnan(difference(by_seed(values), by_seed(values[::-1])).value) or max(map(abs, values)) < math.inf
