"""Means, differences and ratios: against published numbers, by hand, and against SciPy's own tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from runner.tools.compare.statistics import (
    BOOTSTRAP_FROM,
    bootstrap_interval,
    deviation,
    difference,
    mean,
    mean_of,
    modified_z,
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
    """R's `t.test(extra ~ group, paired = TRUE)`: mean −1.58, 95% from −2.4598858 to −0.7001142."""
    estimate = difference(by_seed(FIRST), by_seed(SECOND))
    interval = estimate.interval(0.95)
    assert (estimate.how, estimate.value) == ("paired", pytest.approx(-1.58))
    assert (interval.low, interval.high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)


def test_welch_interval_of_the_sleep_data() -> None:
    """R's `t.test(extra ~ group)`: df 17.776, 95% from −3.3654832 to 0.2054832."""
    interval = welch(FIRST, SECOND).interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((-3.3654832, 0.2054832), abs=1e-7)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 5), (7, 4)])
def test_intervals_are_scipys(sizes: tuple[int, int]) -> None:
    """Unequal sizes and spreads: the intervals of SciPy's Welch test and of its paired test."""
    draw = np.random.default_rng(sum(sizes))
    a, b = draw.normal(3, 1, sizes[0]), draw.normal(2, 5, sizes[1])
    n = min(sizes)
    for level in (0.90, 0.95):
        unpaired, paired = welch(list(a), list(b)).interval(level), mean_of(list(a[:n] - b[:n])).interval(level)
        expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(level)
        assert (unpaired.low, unpaired.high) == pytest.approx(tuple(expected))
        expected = stats.ttest_rel(a[:n], b[:n]).confidence_interval(level)
        assert (paired.low, paired.high) == pytest.approx(tuple(expected))


def test_two_common_seeds_make_a_pair_and_one_does_not() -> None:
    """The choice depends on the seeds only: from two common ones on, only pairs count."""
    baseline = {0: 1.0, 1: 2.0, 2: 99.0}
    two = difference({0: 2.0, 1: 4.0, 7: -50.0}, baseline)
    assert (two.how, two.value, two.sizes) == ("paired", 1.5, (2, 2))
    one = difference({0: 2.0, 8: 4.0}, {0: 1.0, 1: 2.0})
    assert (one.how, one.value, one.sizes) == ("Welch", 1.5, (2, 2))


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0]), ([1.0], [2.0, 3.0]), ([2.0, 3.0], [1.0])])
def test_one_value_has_no_interval(a: list[float], b: list[float]) -> None:
    estimate = welch(a, b)
    assert not estimate.interval(0.95).known
    assert estimate.value == pytest.approx(sum(a) / len(a) - sum(b) / len(b))


def test_equal_values_have_no_spread() -> None:
    """0.1 three times has a standard deviation of exactly 0, though its mean in floating point is not 0.1."""
    assert deviation([0.1, 0.1, 0.1]) == 0.0
    assert mean_of([0.1, 0.1, 0.1]).interval(0.95).half_width == 0
    constant = welch([2.0, 2.0], [1.0, 1.0]).interval(0.95)
    assert (constant.low, constant.high) == (1.0, 1.0)


def test_speed_up_is_a_geometric_mean() -> None:
    """2× and 8× are 4× on average; the interval is t's on the log scale, so its ends multiply to 16."""
    result = speed_up({0: 50.0, 1: 10.0}, {0: 100.0, 1: 80.0})
    assert result.value == pytest.approx(4.0)
    assert result.interval.low * result.interval.high == pytest.approx(16.0)
    half = t_quantile(0.95, 1) * math.log(4) / 2  # the sd of log 2 and log 8 is log 4 ÷ √2, and there are two pairs
    assert math.log(result.interval.high / 4) == pytest.approx(half)
    assert speed_up({5: 50.0, 6: 50.0}, {0: 100.0, 1: 100.0}).value == pytest.approx(2.0)  # unpaired
    assert not speed_up({0: 50.0}, {0: 100.0}).interval.known


def test_bootstrap_is_scipys_bca_and_repeats() -> None:
    values = [float(v) for v in np.random.default_rng(1).exponential(1, BOOTSTRAP_FROM)]
    interval = bootstrap_interval(values, 0.9)
    expected = stats.bootstrap((values,), np.mean, confidence_level=0.9, method="BCa", rng=0).confidence_interval
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx(tuple(expected))
    assert bootstrap_interval(values, 0.9) == interval
    assert bootstrap_interval(values[1:], 0.9) is None
    assert bootstrap_interval([1.0] * BOOTSTRAP_FROM, 0.9) is None


def test_modified_z_by_hand() -> None:
    """A median of 2.45 and a MAD of 0.15: the formula of Iglewicz & Hoaglin (1993), section 3; and a MAD of 0."""
    values = [2.1, 2.6, 2.4, 2.5, 2.3, 2.1, 2.3, 2.6, 8.2, 8.3]
    scores = modified_z(values)
    assert scores[8:] == pytest.approx([0.6745 * 5.75 / 0.15, 0.6745 * 5.85 / 0.15], rel=1e-4)
    assert max(map(abs, scores[:8])) < 3.5
    assert modified_z([1.0, 1.0, 1.0, 2.0, 0.0]) == [0.0, 0.0, 0.0, math.inf, -math.inf]


@pytest.mark.parametrize("values", [[math.inf, 30.0], [30.0, math.nan], [-math.inf, math.inf]])
def test_infinite_values_have_no_mean(values: list[float]) -> None:
    assert math.isnan(mean(values))
    assert math.isnan(welch(values, [1.0, 2.0]).value)
    assert math.isnan(difference(by_seed(values), by_seed(values[::-1])).value)
