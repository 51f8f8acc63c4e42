"""Best weights and patience, on evaluations made up by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from runner.config.choices import Goal
from runner.config.schema import Evaluation
from runner.train.best import Best


def follow(values: list[float], keep_weights: bool = False, **options: Any) -> Best:
    """A `Best` that has seen these values of a metric, the model's one weight being the value itself."""
    best = Best(Evaluation(metric="m", **options), keep_weights)
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
        ([1, 1.4, 1.6], {"min_delta": 0.5}, 3),  # 1.6 is compared with the best so far, 1.0
        ([2, 2, 2], {}, 1),  # an equal value is no improvement
        ([1, math.nan, 2], {}, 3),
        ([math.nan, 5, 9], {}, 3),
        ([1, math.nan], {"goal": Goal.min}, 1),
    ],
)
def test_best_step(values: list[float], options: dict[str, Any], step: int) -> None:
    """The best evaluation is the first that no later one beats by more than `min_delta`."""
    assert follow(values, **options).step == step


def test_weights_are_those_of_the_best_evaluation() -> None:
    """The copy is of the best step, and later training does not reach into it."""
    best = follow([1, 3, 2], keep_weights=True)
    assert best.weights is not None
    assert torch.equal(best.weights["weight"], torch.tensor([[3.0]]))
    assert follow([1, 3, 2]).weights is None


@pytest.mark.parametrize(
    ("values", "patience", "over"),
    [
        ([1, 0], 2, False),
        ([1, 0, 0], 2, True),
        ([1, 0, 2, 0], 2, False),
        ([1, 0], 1, True),
        ([1] + [0] * 9, None, False),
        ([math.nan, math.nan], 1, True),
        ([math.nan, math.nan, 1, 0], 2, False),
        ([1, math.nan, math.nan], 2, True),
    ],
)
def test_patience(values: list[float], patience: int | None, over: bool) -> None:
    """Patience counts evaluations since the last improvement; null waits for ever."""
    assert follow(values, patience=patience).exhausted() is over


def test_state_goes_on_where_it_was() -> None:
    """A restored `Best` remembers value, weights and how long it has waited."""
    first = follow([3, 1], keep_weights=True, patience=2)
    second = Best(Evaluation(metric="m", patience=2), True)
    second.load_state_dict(first.state_dict())
    second.update(3, {"m": 2.0}, nn.Linear(1, 1, bias=False))
    assert second.exhausted()
    assert (second.step, second.value) == (1, 3)
