"""Means, differences and ratios over seeds, with t intervals. Pure arithmetic; what it decides is in `verdict.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from scipy.special import stdtrit

#: From this many pairs on a bootstrap interval is shown beside t's. Below it there is too little to resample.
BOOTSTRAP_FROM = 10
PAIRED, WELCH, SINGLE_PAIR = "paired", "Welch", "one value"


@dataclass(frozen=True)
class Interval:
    """A confidence interval; `level` in 0–1."""

    low: float
    high: float
    level: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Estimate:
    """A mean or a difference of means, with what a t interval needs.

    `standard_error` and `df`: None where there are too few values for a spread; `how`: paired, Welch or one value;
    `pairs`: the values that `value` is the mean of, for paired estimates; `sizes`: values on each side.
    """

    value: float
    standard_error: float | None
    df: float | None
    how: str
    sizes: tuple[int, int]
    pairs: tuple[float, ...] = ()
    spreads: tuple[float, float] = (math.nan, math.nan)

    def interval(self, level: float) -> Interval | None:
        """The two-sided t interval at `level`, or None without a spread."""
        if self.standard_error is None or self.df is None:
            return None
        half = t_quantile(level, self.df) * self.standard_error
        return Interval(self.value - half, self.value + half, level)


def t_quantile(level: float, df: float) -> float:
    """The factor of the standard error in a two-sided interval at `level`."""
    return float(stdtrit(df, (1 + level) / 2))


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation (n − 1); NaN for one value. Of equal values it is 0 exactly."""
    if len(values) < 2:
        return math.nan
    middle = values[0] if min(values) == max(values) else mean(values)
    # Not the root of a sum of squares: a diverged perplexity's would be too large for a float.
    return math.hypot(*(value - middle for value in values)) / math.sqrt(len(values) - 1)


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; NaN where a value is infinite or no number, or all together are too large."""
    values = list(values)
    try:
        return fmean(values) if all(map(math.isfinite, values)) else math.nan
    except OverflowError:
        return math.nan


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of independent values."""
    n = len(values)
    value, spread = mean(values), deviation(values)
    if n < 2:
        return Estimate(value, None, None, SINGLE_PAIR, (n, 0), tuple(values))
    return Estimate(value, spread / math.sqrt(n), n - 1, PAIRED, (n, 0), tuple(values), (spread, math.nan))


def paired(differences: Sequence[float]) -> Estimate:
    """The mean of paired differences (Student 1908)."""
    estimate = mean_of(differences)
    n = len(differences)
    return Estimate(
        estimate.value, estimate.standard_error, estimate.df, estimate.how, (n, n), estimate.pairs, estimate.spreads
    )


def welch(setup: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """mean(setup) − mean(baseline) for unpaired values of unequal spread, with Satterthwaite's df (Welch 1947)."""
    sizes = (len(setup), len(baseline))
    value = mean(setup) - mean(baseline)
    if min(sizes) < 2:
        return Estimate(value, None, None, SINGLE_PAIR, sizes)
    spreads = (deviation(setup), deviation(baseline))
    error, df = welch_error(spreads, sizes)
    return Estimate(value, error, df, WELCH, sizes, (), spreads)


def welch_error(spreads: tuple[float, float], sizes: tuple[int, int]) -> tuple[float, float]:
    """Standard error and degrees of freedom of a difference of means."""
    largest = max(spreads)
    if largest == 0:
        return 0.0, float(sum(sizes) - 2)
    # In units of the larger one, so that no square is too large or too small for a float.
    a, b = ((spread / largest) ** 2 / n for spread, n in zip(spreads, sizes, strict=True))
    return largest * math.sqrt(a + b), (a + b) ** 2 / (a**2 / (sizes[0] - 1) + b**2 / (sizes[1] - 1))


def difference(setup: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate:
    """setup − baseline, by seed. Paired as soon as two seeds are common: a rule that looks at the seeds alone."""
    common = common_seeds(setup, baseline)
    if len(common) >= 2:
        return paired([setup[seed] - baseline[seed] for seed in common])
    return welch(list(setup.values()), list(baseline.values()))


def common_seeds(setup: Mapping[int, float], baseline: Mapping[int, float]) -> list[int]:
    return sorted(setup.keys() & baseline.keys())


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast as the baseline: a geometric mean, its interval symmetric on the log scale."""

    value: float
    interval: Interval | None


def speed_up(setup: Mapping[int, float], baseline: Mapping[int, float], level: float = 0.95) -> SpeedUp:
    """From seconds by seed: exp of the mean of log(baseline ÷ setup), paired or Welch as for the metric."""
    logs = [{seed: -math.log(seconds) for seed, seconds in side.items()} for side in (setup, baseline)]
    estimate = difference(*logs)
    interval = estimate.interval(level)
    if interval is not None:
        interval = Interval(math.exp(interval.low), math.exp(interval.high), level)
    return SpeedUp(math.exp(estimate.value), interval)


def bootstrap_interval(differences: Sequence[float], level: float) -> Interval | None:
    """Efron's BCa interval of a mean (1987), always the same for the same values; None where it says nothing."""
    if len(differences) < BOOTSTRAP_FROM or min(differences) == max(differences):
        return None
    from scipy import stats  # a second of imports that few comparisons need

    result = stats.bootstrap((differences,), np.mean, confidence_level=level, method="BCa", rng=0)
    low, high = map(float, result.confidence_interval)
    return Interval(low, high, level) if math.isfinite(low) and math.isfinite(high) else None


def modified_z(values: Sequence[float]) -> list[float]:
    """Each value's modified z score, 0.6745 × deviation from the median ÷ MAD (Iglewicz & Hoaglin 1993, section 3).

    Where more than half of the values are equal the MAD is 0: any other value is then infinitely far off.
    """
    middle = median(values)
    mad = median(abs(value - middle) for value in values)
    return [_score(value - middle, mad) for value in values]


def _score(off: float, mad: float) -> float:
    if mad:
        return 0.6745 * off / mad
    return math.copysign(math.inf, off) if off else 0.0
