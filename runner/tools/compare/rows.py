"""The evaluation rows are a sample, too: what other rows would do to a difference between setups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from runner.tools.compare.runs import Run
from runner.tools.compare.setups import SetupRuns
from runner.tools.compare.statistics import Estimate, RowSampling, common_seeds, difference
from runner.tools.compare.verdict import Margin


def metric_difference(setup: SetupRuns, baseline: SetupRuns, margin: Margin) -> Estimate:
    """The difference of the metric, setup − baseline, over seeds and evaluation rows."""
    estimate = difference(setup.metrics, baseline.metrics)
    return dataclasses.replace(estimate, sampling=_row_sampling(estimate.value, setup, baseline, margin))


def _row_sampling(value: float, setup: SetupRuns, baseline: SetupRuns, margin: Margin) -> RowSampling | None:
    """The effect of other rows on the difference `value`; None if rows, or what one can change, are not known.

    If the metric counts rows, a true difference as large as the margin, or as the one that was found, takes at least
    that share of rows (`least_error`). If runs have kept the metric by row, the error is that of the rows that differ
    in all seeds, if larger.
    """
    rows = min((run.eval_rows or 0) for run in (*setup.runs, *baseline.runs))
    by_seed = [{run.seed: run for run in one.runs} for one in (setup, baseline)]
    pairs = [tuple(one[seed] for one in by_seed) for seed in common_seeds(setup.metrics, baseline.metrics)]
    differences = row_differences(pairs) if len(pairs) >= 2 else None
    if not rows or not math.isfinite(value) or (margin.width is None and differences is None):
        return None
    width = margin.width or 0.0
    error = float(least_error(value, margin.value or 0.0, width, rows)) if width else 0.0
    if differences is not None:
        error = max(error, float(lasting_error(differences)))
    return RowSampling(rows, error, width / rows, by_row=differences is not None)


def least_error(difference: Any, margin: float, width: float, rows: int) -> Any:
    """Poisson's standard error of the rows that must have changed, in the metric's unit. Numbers or arrays."""
    return width * np.sqrt(np.maximum(np.abs(difference), margin) / width / rows)


def row_differences(pairs: Sequence[tuple[Run, ...]]) -> np.ndarray | None:
    """The difference of each row between the first run of a pair and the second, [seeds, rows].

    None without the rows of all runs, or if they are of different rows.
    """
    kept = [one.row_metrics for pair in pairs for one in pair if one.row_metrics is not None]
    if len(kept) < 2 * len(pairs) or len({len(values) for values in kept}) > 1:
        return None
    rows = np.stack(kept)
    return rows[::2] - rows[1::2]


def lasting_error(differences: np.ndarray) -> Any:
    """Standard error of the part of the mean difference that belongs to the rows and not to the seeds.

    The variance between rows of their mean over seeds, less what seeds contribute to it (two-way random effects).
    `differences`: as `row_differences` returns them, of shape [..., seeds, rows]; the result has shape [...].
    """
    seeds, rows = differences.shape[-2:]
    of_means = differences.mean(-2).var(axis=-1, ddof=1)
    of_seeds = differences.var(axis=-1, ddof=1).mean(-1)
    return np.sqrt(np.maximum(0.0, of_means - (of_seeds - of_means) / (seeds - 1)) / rows)
