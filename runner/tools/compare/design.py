"""Sweeps that add seeds until a setup is decided: the levels at which one may look after every seed."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # imports scipy
    from runner.tools.compare.statistics import Estimate

#: Simulated sequences of seeds. One of 1,000 levels of 0.25% is then known to 5% of itself.
_SEQUENCES = 200_000
_SEED = 20_261_125


@dataclass(frozen=True)
class Levels:
    """Levels of the two-sided intervals that decide: the one inside the margin, and the one without 0."""

    equivalence: float
    difference: float


@dataclass(frozen=True)
class Design:
    """Up to `max_seeds` pairs of runs for each of `comparisons` setups, and a look after each pair from `min_seeds` on.

    Each look is Student's t test (group-sequential; Jennison & Turnbull 2000, chapters 4 and 8). Its level after n
    pairs is proportional to n, and so low that of 100 setups that differ by the margin at most 5 are called equivalent
    at any look, and of 100 that are like the baseline at most 5 different. Several setups share the 5 (Bonferroni). To
    look less often, or to stop early for want of time, only makes errors rarer.
    """

    min_seeds: int
    max_seeds: int
    comparisons: int

    def levels(self, seeds: int) -> Levels:
        """Levels of the two-sided intervals after `seeds` pairs; 1, of unlimited ones, before the first look."""
        if seeds < self.min_seeds:
            return Levels(1.0, 1.0)
        share = min(seeds, self.max_seeds) / self.max_seeds
        equivalent, different = _last_levels(self)
        return Levels(1 - 2 * equivalent * share, 1 - 2 * different * share)

    def rows_leave_open(self, difference: Estimate, margin: float) -> bool:
        """Whether the evaluation rows leave it undecided with any number of seeds, for all differences in the interval.

        The interval is that of the seeds alone at the present look: they have to rule out a verdict, not only to make
        it look unlikely. Giving up early makes no wrong verdict more likely.
        """
        sampling = difference.sampling
        if sampling is None:
            return False
        seeds = replace(difference, sampling=None).half_width(self.levels(difference.sizes[0]).difference)
        nearest, farthest = max(0.0, abs(difference.value) - seeds), abs(difference.value) + seeds
        last = self.levels(self.max_seeds)
        equivalent = nearest + sampling.half_width(last.equivalence) < margin
        return not equivalent and bool(farthest <= sampling.half_width(last.difference))

    def expected_seeds(self, difference: float) -> float:
        """The mean seeds of simulated setups with this true difference; spread of differences and margin are 1."""
        from scipy.special import stdtrit

        values = np.random.default_rng(_SEED).standard_normal((2_000, self.max_seeds)) + difference
        seeds = np.full(len(values), self.max_seeds)
        for n in range(self.max_seeds, self.min_seeds - 1, -1):
            mean, error = values[:, :n].mean(axis=1), values[:, :n].std(axis=1, ddof=1) / np.sqrt(n)
            equivalence, differs = (stdtrit(n - 1, (1 + level) / 2) * error for level in astuple(self.levels(n)))
            seeds[(np.abs(mean) + equivalence < 1) | (np.abs(mean) > differs)] = n
        return float(seeds.mean())


@functools.cache
def _last_levels(design: Design) -> tuple[float, float]:
    """One-sided levels of the last look, for an error of 5%, and of 2.5% in each direction.

    The t statistics of normal values do not depend on mean and spread under the hypothesis, so that their smallest
    p value over all looks can be simulated once, with a fixed seed.
    """
    from scipy.special import stdtr

    n = np.arange(1, design.max_seeds + 1)
    smallest = []
    generator = np.random.default_rng(_SEED)
    for _ in range(10):
        values = generator.standard_normal((_SEQUENCES // 10, design.max_seeds))
        means = np.cumsum(values, axis=1) / n
        squares = np.cumsum(values**2, axis=1) - n * means**2
        looks = slice(max(design.min_seeds, 2) - 1, None)
        t = means[:, looks] / np.sqrt(squares[:, looks] / (n[looks] * (n[looks] - 1)))
        smallest.append((stdtr(n[looks] - 1, -t) * design.max_seeds / n[looks]).min(axis=1))
    errors = np.array([0.05, 0.025]) / design.comparisons
    equivalent, different = np.quantile(np.concatenate(smallest), errors)
    return float(equivalent), float(different)
