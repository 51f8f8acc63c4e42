"""What each evaluation row contributes to a metric that is no mean over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def row_metrics(counts: Tensor, metrics: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Tensor]:
    """A value of each of the `metrics` for each row, fp64 of shape [rows]; their mean is the metric.

    `counts`: of each row, [rows, n]; a metric is a differentiable function of their means, [n]. A row's value is the
    metric and what the row's distance from these means adds to it in first order: its empirical influence (Efron &
    Tibshirani 1993, chapter 21). So a mean over rows has just the rows' own values, and the spread of the values is
    that of the metric over samples of rows.
    """
    counts = counts.double()
    found = {}
    for name, metric in metrics.items():
        with torch.enable_grad():
            means = counts.mean(0).requires_grad_()
            value = metric(means)
            (gradient,) = torch.autograd.grad(value, means)
        found[name] = value.detach() + (counts - means.detach()) @ gradient
    return found


def ratio(numerator: int, denominator: int, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
    """One column of counts over another, such as losses over targets."""
    return lambda means: scale * means[numerator] / means[denominator]


#: Of counts that begin with the loss of a row's targets and their number.
OF_LOSS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "loss": ratio(0, 1),
    "perplexity": lambda means: (means[0] / means[1]).exp(),
}
