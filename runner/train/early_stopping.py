"""Follow the evaluation metric: keep the best weights, and stop a run that no longer improves."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from runner.config.choices import Goal
from runner.config.schema import Evaluation
from runner.train.adapter import changing_state


class BestTracker:
    """Remembers the best evaluation, its weights on the CPU if `keeps_weights`, and counts evaluations without gain."""

    def __init__(self, config: Evaluation, keeps_weights: bool) -> None:
        self._config = config
        self.keeps_weights = keeps_weights
        self.value: float | None = None
        self.step: int | None = None
        self.metrics: dict[str, float] = {}
        self.weights: dict[str, Tensor] | None = None
        self._without_improvement = 0

    def update(self, step: int, metrics: dict[str, float], model: nn.Module) -> bool:
        """Take an evaluation of `model` into account; whether it is the best so far."""
        value = metrics[self._config.metric]
        if improves := self._improves(value):
            self.value, self.step, self.metrics = value, step, metrics
            self._without_improvement = 0
            if self.keeps_weights:
                tensors = changing_state(model)
                self.weights = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        else:
            self._without_improvement += 1
        return improves

    def _improves(self, value: float) -> bool:
        if self.value is None:
            return True
        if math.isnan(value) or math.isnan(self.value):
            return not math.isnan(value)  # any number is better than NaN, and NaN is never better
        gain = value - self.value if self._config.goal is Goal.max else self.value - value
        return gain > self._config.min_delta

    def should_stop(self) -> bool:
        """True after `patience` evaluations without an improvement."""
        return self._config.patience is not None and self._without_improvement >= self._config.patience

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "step": self.step,
            "metrics": self.metrics,
            "weights": self.weights,
            "without_improvement": self._without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.step, self.metrics = state["value"], state["step"], state["metrics"]
        self.weights = state["weights"] if self.keeps_weights else None
        self._without_improvement = state["without_improvement"]
