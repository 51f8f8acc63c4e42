"""Which evaluation was the best, and whether waiting for a better one is still worth it."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from runner.config.choices import Goal
from runner.config.schema import Evaluation


class Best:
    """Follows one metric over evaluations; keeps the best weights if asked to.

    `keep_weights`: hold a CPU copy of the best weights (on the one worker that saves them).
    """

    def __init__(self, config: Evaluation, keep_weights: bool) -> None:
        self._config = config
        self._keep_weights = keep_weights
        self.value: float | None = None
        self.step: int | None = None
        self.metrics: dict[str, float] = {}
        self.weights: dict[str, Tensor] | None = None
        self._without_improvement = 0

    def update(self, step: int, metrics: dict[str, float], model: nn.Module) -> None:
        value = metrics[self._config.metric]
        if self.value is None or self._gain(value) > self._config.min_delta:
            self.value, self.step, self.metrics = value, step, metrics
            self._without_improvement = 0
            if self._keep_weights:
                self.weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        else:
            self._without_improvement += 1

    def _gain(self, value: float) -> float:
        assert self.value is not None
        if math.isnan(value):
            return -math.inf  # no improvement on anything, on another of its kind neither
        if math.isnan(self.value):
            return math.inf
        return value - self.value if self._config.goal is Goal.max else self.value - value

    def exhausted(self) -> bool:
        """Whether `patience` evaluations have passed without an improvement."""
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
        self.weights = state["weights"]
        self._without_improvement = state["without_improvement"]
