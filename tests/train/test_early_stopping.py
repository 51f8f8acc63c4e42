"""The best evaluation, its weights, and patience."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from runner.config.choices import Goal
from runner.config.schema import Evaluation
from runner.train.early_stopping import BestTracker


def tracker_after(values: list[float], keep_weights: bool = False, **options: Any) -> BestTracker:
    """A tracker that has seen these values of the metric; the model's only weight equals the value."""
    best = BestTracker(Evaluation(metric="m", **options), keep_weights)
    model = nn.Linear(1, 1, bias=False)
    for step, value in enumerate(values, 1):
        nn.init.constant_(model.weight, value)
        best.update(step, {"m": value}, model)
    return best


@pytest.mark.parametrize(
    ("values", "options", "step"),
    [
        ([1, 3, 2], {}, 2),
        ([1, 3, 2], {"goal": Goal.min}, 1),
        ([1, 1.4, 1.6], {"min_delta": 0.5}, 3),  # compared with the best so far, 1.0
        ([2, 2, 2], {}, 1),
        ([1, math.nan, 2], {}, 3),
        ([math.nan, 5, 9], {}, 3),
        ([1, math.nan], {"goal": Goal.min}, 1),
    ],
)
def test_best_step(values: list[float], options: dict[str, Any], step: int) -> None:
    assert tracker_after(values, **options).step == step


def test_weights_are_a_copy_of_the_best() -> None:
    best = tracker_after([1, 3, 2], keep_weights=True)
    assert best.weights is not None
    assert torch.equal(best.weights["weight"], torch.tensor([[3.0]]))
    assert tracker_after([1, 3, 2]).weights is None


@pytest.mark.parametrize(
    ("values", "patience", "stop"),
    [
        ([1, 0], 2, False),
        ([1, 0, 0], 2, True),
        ([1, 0, 2, 0], 2, False),
        ([1] + [0] * 9, None, False),
        ([math.nan, math.nan], 1, True),
        ([1, math.nan, math.nan], 2, True),
    ],
)
def test_patience_counts_evaluations_without_improvement(values: list[float], patience: int | None, stop: bool) -> None:
    assert tracker_after(values, patience=patience).should_stop() is stop


def test_restored_state_continues() -> None:
    second = BestTracker(Evaluation(metric="m", patience=2), True)
    second.load_state_dict(tracker_after([3, 1], keep_weights=True, patience=2).state_dict())
    second.update(3, {"m": 2.0}, nn.Linear(1, 1, bias=False))
    assert second.should_stop()
    assert (second.step, second.value) == (1, 3)
