"""How often are verdicts wrong if a metric is a count of few evaluation rows?

Two setups share seeds and rows. A prediction of the setup differs from the baseline's where it *flips*: anew in each
seed, or on the same rows in all of them. `python benchmarks/small_evaluation_sets.py` prints the tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq

from runner.tools.compare.rows import lasting_error, least_error
from runner.tools.compare.statistics import PAIRED, Estimate, RowSampling
from runner.tools.compare.verdict import DIFFERENCE_LEVEL, EQUIVALENCE_LEVEL

MARGIN = 1.0
#: The width of each metric's scale, in percentage points.
WIDTHS = {"accuracy": 100.0, "matthews": 200.0}
#: Comparisons whose rows are in memory together.
_AT_ONCE = 200
#: The baseline's accuracy in both classes.
_RIGHT = 0.85


class Flips(NamedTuple):
    """`both_ways`: share of rows that flip besides those that lose points, half of them to right. `lasting`: on the
    same rows in all seeds."""

    both_ways: float
    lasting: bool


def metric_of(metric: str, right: Sequence[Any], rows: Sequence[Any]) -> Any:
    """The metric in percent, from the number of right predictions and of rows in each of two classes; any arrays."""
    (a, b), (p, n) = right, rows
    if metric == "accuracy":
        return 100 * (a + b) / (p + n)
    spread = (1.0 * p * n * (a + n - b) * (p - a + b)) ** 0.5
    return 100 * (a * b - (n - b) * (p - a)) / (spread + (spread == 0))


def differences(
    draw: np.random.Generator, comparisons: int, seeds: int, rows: int, metric: str, lost: float, flips: Flips
) -> np.ndarray:
    """Setup − baseline for each comparison and seed, where the setup truly loses this many percentage points."""
    to_wrong, to_right = _flip_shares(metric, lost, flips)
    first = draw.binomial(rows, 0.5, (comparisons, 1))
    classes = [first, rows - first]
    before = [draw.binomial(size, _RIGHT) for size in classes]
    shape = (comparisons, 1 if flips.lasting else seeds)
    after = [
        right - draw.binomial(right, to_wrong, shape) + draw.binomial(size - right, to_right, shape)
        for size, right in zip(classes, before, strict=True)
    ]
    found = metric_of(metric, after, classes) - metric_of(metric, before, classes)
    return np.broadcast_to(found, (comparisons, seeds))


def _flip_shares(metric: str, lost: float, flips: Flips) -> tuple[float, float]:
    """The share of right predictions that flip to wrong, and of wrong ones to right."""
    to_right = flips.both_ways / 2 / (1 - _RIGHT)

    def loss(to_wrong: float) -> float:
        right = _RIGHT * (1 - to_wrong) + (1 - _RIGHT) * to_right
        halves = [np.array(0.5)] * 2
        before, after = (metric_of(metric, [np.array(share / 2)] * 2, halves) for share in (_RIGHT, right))
        return float(before - after) - lost

    return float(brentq(loss, 0.0, 0.9)), to_right


def row_differences(
    draw: np.random.Generator, comparisons: int, seeds: int, rows: int, metric: str, lost: float, flips: Flips
) -> np.ndarray:
    """The same by row, [comparisons, seeds, rows]: the difference is the mean over rows."""
    to_wrong, to_right = _flip_shares(metric, lost, flips)
    of_first = draw.random((comparisons, 1, rows)) < 0.5
    before = draw.random((comparisons, 1, rows)) < _RIGHT
    uniform = draw.random((comparisons, 1 if flips.lasting else seeds, rows), dtype=np.float32)
    after = np.where(before, uniform >= to_wrong, uniform < to_right)
    found = _by_row(metric, of_first, after) - _by_row(metric, of_first, before)
    return np.broadcast_to(found, (comparisons, seeds, rows))


def _by_row(metric: str, of_first: np.ndarray, right: np.ndarray) -> np.ndarray:
    """As `recipes.tasks.row_metrics`, of many evaluations at once: the last dimension has the rows."""
    of_first = np.broadcast_to(of_first, right.shape)  # each evaluation has its own gradient
    own = [right & of_first, right & ~of_first, of_first, ~of_first]
    means = [torch.from_numpy(one.mean(-1, keepdims=True)).requires_grad_() for one in own]
    value = metric_of(metric, means[:2], means[2:])
    gradients = torch.autograd.grad(value.sum(), means, allow_unused=True)
    # The metric does not change with the number of rows, so that gradient · means is 0.
    parts = [
        one * grad.numpy().astype(np.float32) for one, grad in zip(own, gradients, strict=True) if grad is not None
    ]
    return value.detach().numpy().astype(np.float32) + sum(parts)


def verdicts(found: np.ndarray, rows: int, width: float, kept: np.ndarray | None = None) -> tuple[float, float, float]:
    """The shares called equivalent without regard to rows, equivalent, and different. `kept`: `row_differences`."""
    mean, seeds = found.mean(1), found.shape[1]
    spread = np.where(np.ptp(found, axis=1) < 1e-9, 0.0, found.std(1, ddof=1))
    error = least_error(mean, MARGIN, width, rows)
    if kept is not None:
        error = np.maximum(error, lasting_error(kept))
    without, with_rows = (
        Estimate(mean, PAIRED, (seeds, seeds), (spread, np.nan), sampling=sampling)  # type: ignore[arg-type]
        for sampling in (None, RowSampling(rows, error, width / rows))
    )
    before, equivalent = (abs(mean) + one.half_width(EQUIVALENCE_LEVEL) < MARGIN for one in (without, with_rows))
    different = ~equivalent & (abs(mean) > with_rows.half_width(DIFFERENCE_LEVEL))
    return float(before.mean()), float(equivalent.mean()), float(different.mean())


def table(metric: str, flips: Flips, comparisons: int, kept: bool = False) -> Iterator[str]:
    """Lines of Markdown, in percent of comparisons. `kept`: whether metrics were kept by row."""
    yield "| rows | seeds | 1 point worse: equivalent before | now | the same: different | equivalent before | now |"
    yield "| --: | --: | --: | --: | --: | --: | --: |"
    for rows, seeds in itertools.product((50, 100, 200, 300, 400, 1000, 5000), (2, 3, 5, 10)):
        draw = np.random.default_rng([rows, seeds])

        def shares(lost: float, draw: np.random.Generator = draw, rows: int = rows, seeds: int = seeds) -> np.ndarray:
            if not kept:
                found = differences(draw, comparisons, seeds, rows, metric, lost, flips)
                return np.array(verdicts(found, rows, WIDTHS[metric]))
            parts = (
                row_differences(draw, _AT_ONCE, seeds, rows, metric, lost, flips)
                for _ in range(comparisons // _AT_ONCE)
            )
            return np.mean([verdicts(part.mean(-1), rows, WIDTHS[metric], part) for part in parts], axis=0)

        (wrong_before, wrong, _), (right_before, right, different) = shares(MARGIN), shares(0.0)
        figures = (wrong_before, wrong, different, right_before, right)
        yield f"| {rows:,} | {seeds} | " + " | ".join(f"{100 * figure:.1f}" for figure in figures) + " |"


if __name__ == "__main__":
    for both_ways, lasting in itertools.product((0.0, 0.05), (False, True)):
        for metric in WIDTHS:
            print(f"\n## {metric}, {both_ways:.0%} of rows flip both ways, {'lasting' if lasting else 'anew'}\n")
            print(*table(metric, Flips(both_ways, lasting), 20_000), sep="\n")
    for lasting, metric in itertools.product((False, True), WIDTHS):
        print(f"\n## {metric} kept by row, 5% of rows flip both ways, {'lasting' if lasting else 'anew'}\n")
        print(*table(metric, Flips(0.05, lasting), 4_000, kept=True), sep="\n")
