"""Metrics by row: their mean is the metric, and they tell what it would be on other rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.tasks.problems import PROBLEMS

ROWS = 400


def single_label(draw: np.random.Generator, classes: int) -> tuple[Tensor, Tensor]:
    """Logits, and labels with which three of four predictions agree."""
    logits = torch.from_numpy(draw.normal(size=(ROWS, classes)))
    labels = logits.argmax(-1)
    other = torch.from_numpy(draw.random(ROWS) < 0.25)
    return logits, torch.where(other, (labels + 1) % classes, labels)


def multi_label(draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    logits = torch.from_numpy(draw.normal(size=(ROWS, 3)))
    return logits, (logits + torch.from_numpy(draw.normal(size=(ROWS, 3))) > 0).long()


def regression(draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    logits = torch.from_numpy(draw.normal(size=(ROWS, 1)))
    return logits, logits[:, 0] + torch.from_numpy(draw.normal(size=ROWS))


CASES: dict[str, tuple[str, Callable[[np.random.Generator], tuple[Tensor, Tensor]], set[str]]] = {
    "two classes": ("single_label", lambda draw: single_label(draw, 2), {"auc"}),
    "four classes": ("single_label", lambda draw: single_label(draw, 4), {"auc", "f1", "precision", "recall"}),
    "several classes": ("multi_label", multi_label, {"auc", "ranking_precision"}),
    "a number": ("regression", regression, {"pearson", "spearman", "r2"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_metric_and_its_sampling(case: str) -> None:
    """By row: the mean is the metric; the mean of other rows is, nearly, the metric of these."""
    problem, data, others = CASES[case]
    draw = np.random.default_rng(0)
    logits, labels = data(draw)
    metrics = PROBLEMS[problem].metrics
    by_row = PROBLEMS[problem].row_metrics(logits, labels)
    assert by_row.keys() == metrics.keys() - others
    samples = [torch.from_numpy(draw.integers(0, ROWS, ROWS)) for _ in range(60)]
    for name, values in by_row.items():
        assert values.shape == (ROWS,)
        assert float(values.mean()) == pytest.approx(metrics[name](logits, labels), rel=1e-9)
        resampled = [metrics[name](logits[rows], labels[rows]) for rows in samples]
        told = [float(values[rows].mean()) for rows in samples]
        assert np.corrcoef(resampled, told)[0, 1] > 0.98
        assert np.std(told) == pytest.approx(np.std(resampled), rel=0.1)


def test_a_class_that_is_always_predicted_has_no_correlation_by_row() -> None:
    """Matthews is 0 by definition there, and what a row adds to it is not defined: nan, which nobody pairs."""
    labels = torch.arange(8) % 2
    by_row = PROBLEMS["single_label"].row_metrics(torch.tensor([[1.0, 0.0]] * 8), labels)
    assert by_row["matthews"].isnan().all()
    assert float(by_row["accuracy"].mean()) == 50
    assert float(by_row["macro_f1"].mean()) == pytest.approx(100 / 3)
