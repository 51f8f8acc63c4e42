"""Sweeps that add seeds until a setup is decided: the levels at which one may look after every seed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

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
