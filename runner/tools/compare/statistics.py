"""Means, differences and ratios over seeds, with t intervals. What follows from them is decided in `verdict.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtri, stdtrit

#: From this number of pairs on, a bootstrap interval is shown next to the t interval. Fewer are too few to resample.
BOOTSTRAP_FROM = 10
#: The standard deviation of normal values ÷ their median absolute deviation.
NORMAL_MAD = 1.4826
PAIRED, WELCH, SINGLE_VALUE = "paired", "Welch", "one value"


@dataclass(frozen=True)
class Interval:
    """A confidence interval; infinite if there are too few values for a spread."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def known(self) -> bool:
        return math.isfinite(self.half_width)


@dataclass(frozen=True)
class RowSampling:
    """What other evaluation rows would do to a difference, besides what the spread of its seeds shows.

    `rows`: their number; `error`: standard error; `one_row`: by how much one row can move the metric; `by_row`: whether
    runs were compared row by row.
    """

    rows: int
    error: float
    one_row: float
    by_row: bool = False

    def half_width(self, level: float, rows: Any = None) -> Any:
        """Half of the two-sided interval at `level`; the metric moves in steps, hence half a step more.

        `rows`: another number of them, may be an array.
        """
        times = self.rows / (self.rows if rows is None else rows)
        return normal_quantile(level) * self.error * np.sqrt(times) + self.one_row / 2 * times


@dataclass(frozen=True)
class Estimate:
    """A mean or a difference of means.

    `how`: paired, Welch or one value; `sizes`: number of values on each side; `spreads`: their standard deviations,
    of the differences if paired, NaN for one value; `pairs`: the paired differences; `sampling`: of the evaluation
    rows, None if it is not known or does not matter.
    """

    value: float
    how: str
    sizes: tuple[int, int]
    spreads: tuple[float, float]
    pairs: tuple[float, ...] = ()
    sampling: RowSampling | None = None

    def interval(self, level: float) -> Interval:
        """The two-sided t interval at `level`; unlimited where a side has one value, whose spread is not known."""
        if self.how == SINGLE_VALUE:
            return Interval(-math.inf, math.inf)
        half = float(self.half_width(level))
        half = math.inf if math.isnan(half) else half
        return Interval(self.value - half, self.value + half)

    def half_width(self, level: float, more_seeds: Any = 0) -> Any:
        """Half of `interval`; `more_seeds`: on each side, with the same spread, may be an array."""
        error, df = standard_error(self.how, self.spreads, tuple(size + more_seeds for size in self.sizes))
        return self._with_rows(t_quantile(level, df) * error, level)

    def bootstrap(self, level: float) -> Interval | None:
        """The same with Efron's interval over the paired differences in place of Student's; None for few or equal."""
        interval = bootstrap_interval(self.pairs, level)
        if interval is None:
            return None
        low, high = (float(self._with_rows(abs(bound - self.value), level)) for bound in (interval.low, interval.high))
        return Interval(self.value - low, self.value + high)

    def p_value(self, distance: float) -> float:
        """The two-sided p value of values `distance` away: 1 − the level at which `interval` reaches as far."""
        if not distance > self.half_width(0.0):  # or the spread is too large to square
            return 1.0
        surely = 1 - 1e-12
        if distance >= self.half_width(surely):
            return 1 - surely
        return 1 - float(brentq(lambda level: self.half_width(level) - distance, 0.0, surely))

    def _with_rows(self, half: Any, level: float) -> Any:
        """Seeds and rows are independent, so their half widths add up as the sides of a right-angled triangle do."""
        return half if self.sampling is None else np.hypot(half, self.sampling.half_width(level))


def standard_error(how: str, spreads: tuple[float, float], sizes: tuple[Any, Any]) -> tuple[Any, Any]:
    """Standard error and degrees of freedom of a mean of pairs, or of a difference of means (Welch 1947).

    `sizes` may be arrays: `scipy.stats.ttest_rel` and `ttest_ind` need the samples, and further seeds have none yet.
    """
    if how != WELCH:
        return spreads[0] / np.sqrt(sizes[0]), sizes[0] - 1
    if max(spreads) == 0:
        return 0.0 * sizes[0], sizes[0] + sizes[1] - 2
    with np.errstate(all="ignore"):  # a diverged perplexity may be too large to square: the result is then inf or NaN
        a, b = (np.square(spread) / n for spread, n in zip(spreads, sizes, strict=True))
        return np.sqrt(a + b), (a + b) ** 2 / (a**2 / (sizes[0] - 1) + b**2 / (sizes[1] - 1))


def t_quantile(level: float, df: Any) -> Any:
    """The factor of the standard error in a two-sided interval at `level`. `df` may be an array."""
    return stdtrit(df, (1 + level) / 2)


def normal_quantile(level: float) -> float:
    """The same where the standard error is known."""
    return float(ndtri((1 + level) / 2))


def deviation(values: Iterable[float]) -> float:
    """The sample standard deviation (n − 1); NaN for one value, and exactly 0 for equal values."""
    values = list(values)
    if len(values) < 2:
        return math.nan
    with np.errstate(all="ignore"):
        return float(np.std(values, ddof=1)) if min(values) != max(values) else 0.0


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; NaN if a value is infinite or NaN."""
    values = list(values)
    return float(np.mean(values)) if np.isfinite(values).all() else math.nan


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of independent values, or of paired differences (Student 1908)."""
    n = len(values)
    how = PAIRED if n > 1 else SINGLE_VALUE
    return Estimate(mean(values), how, (n, n), (deviation(values), math.nan), tuple(values))


def welch(setup: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """mean(setup) − mean(baseline) of unpaired values with unequal spread."""
    sizes = (len(setup), len(baseline))
    how = WELCH if min(sizes) > 1 else SINGLE_VALUE
    return Estimate(mean(setup) - mean(baseline), how, sizes, (deviation(setup), deviation(baseline)))


def difference(setup: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate:
    """setup − baseline, both by seed; paired if two seeds are common. The choice depends on the seeds only."""
    common = common_seeds(setup, baseline)
    if len(common) >= 2:
        return mean_of([setup[seed] - baseline[seed] for seed in common])
    return welch(list(setup.values()), list(baseline.values()))


def common_seeds(setup: Mapping[int, float], baseline: Mapping[int, float]) -> list[int]:
    return sorted(setup.keys() & baseline.keys())


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast as the baseline: a geometric mean; the interval is symmetric on the log scale."""

    value: float
    interval: Interval


def speed_up(setup: Mapping[int, float], baseline: Mapping[int, float]) -> SpeedUp:
    """exp of the mean of log(baseline ÷ setup) of seconds by seed, paired or Welch as for the metric; 95% interval."""
    logs = [{seed: -math.log(seconds) for seed, seconds in side.items()} for side in (setup, baseline)]
    estimate = difference(*logs)
    interval = estimate.interval(0.95)
    return SpeedUp(math.exp(estimate.value), Interval(float(np.exp(interval.low)), float(np.exp(interval.high))))


def bootstrap_interval(differences: Sequence[float], level: float) -> Interval | None:
    """Efron's BCa interval of the mean (1987) with a fixed seed; None for few or equal values."""
    if len(differences) < BOOTSTRAP_FROM or min(differences) == max(differences):
        return None
    result = stats.bootstrap((differences,), np.mean, confidence_level=level, method="BCa", rng=0)
    interval = Interval(*map(float, result.confidence_interval))
    return interval if interval.known else None


def modified_z(values: Sequence[float]) -> list[float]:
    """Each value's modified z score: deviation from the median ÷ normalised MAD (Iglewicz & Hoaglin 1993, section 3).

    If more than half of the values are equal, the MAD is 0 and every other value is infinitely far away.
    """
    off = np.asarray(values) - np.median(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = off / stats.median_abs_deviation(values, scale="normal")
    return [float(score) for score in np.where(off == 0, 0.0, scores)]


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Spearman's; None if it is not defined, as for two equal numbers or a single pair."""
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    return float(stats.spearmanr(xs, ys).statistic)
