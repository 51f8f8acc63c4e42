"""What tasks have in common whose rows get a class, several or a number: the metrics, and checking a saved model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recipes.models.pretrained import Pretrained
from recipes.tasks.pretrained_recipe import check_label_smoothing, check_metrics_shown
from recipes.tasks.problems import PROBLEMS, Problem, class_loss
from runner.data.recipe import DataFacts, Recipe
from runner.data.table import Table
from runner.errors import UserError, require


class ProblemRecipe(Recipe):
    """`metrics_shown`: of those of the problem, or None for those that fit the number of classes.

    `label_smoothing`: the share of each target's weight that all classes get in training, where a row has one class.

    Tables have the columns of the problem (`Problem.columns`), and predictions are logits, [rows, outputs].
    """

    metrics_shown: Sequence[str] | None
    label_smoothing: float

    @property
    @abstractmethod
    def targets(self) -> Problem:
        """What a row gets."""

    @property
    def _name(self) -> str:
        return next(name for name, problem in PROBLEMS.items() if problem is self.targets)

    def check_metrics_shown(self) -> None:
        """Check the setting of that name. Raises UserError."""
        check_metrics_shown(self.metrics_shown, self.targets.metrics, f" of recipe.problem={self._name}")

    def check_label_smoothing(self) -> None:
        """Check the setting of that name. Raises UserError."""
        check_label_smoothing(self.label_smoothing)
        ok = self.label_smoothing == 0 or self._name == "single_label"
        require(ok, "recipe.label_smoothing", self.label_smoothing, f"recipe.problem={self._name} has none; use 0")

    def training_loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """As `Problem.loss`, with smoothed labels."""
        smoothing = self.label_smoothing
        return class_loss(logits, labels, smoothing) if smoothing else self.targets.loss(logits, labels)

    @property
    def metric_names(self) -> Sequence[str]:
        return self._metric_names(classes=2)

    def metrics_of(self, facts: DataFacts) -> Sequence[str]:
        return self._metric_names(len(facts.label_names))

    def _metric_names(self, classes: int) -> list[str]:
        shown = self.targets.fitting(classes) if self.metrics_shown is None else self.metrics_shown
        return [*dict.fromkeys([*shown, "loss"])]

    @property
    def minimised(self) -> Sequence[str]:
        return self.targets.minimised

    def check_metrics(self, names: Sequence[str], labels: Any) -> None:
        """Check that the metrics are defined for these classes and evaluation labels. Raises UserError."""
        why = self.targets.undefined(self._metric_names(len(names)), names, labels)
        require(why is None, "recipe.metrics_shown", self.metrics_shown, why or "")

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        labels = self.targets.tensor(table[range(len(table))]["label"])
        shown = self._metric_names(predictions.shape[-1])
        return {name: self.targets.metrics[name](predictions, labels) for name in shown}

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        labels = self.targets.tensor(table[range(len(table))]["label"])
        shown = self._metric_names(predictions.shape[-1])
        found = self.targets.row_metrics(predictions, labels)
        return {name: values for name, values in found.items() if name in shown}

    def check_saved(self, model: Pretrained) -> None:
        """Check that a saved model was trained for the same problem. Raises UserError."""
        saved = model.problem_type()
        if saved not in (None, self.targets.problem_type):
            rule = (
                f"{model.name} was trained for {saved}, by its config.json; choose the recipe that it was trained with"
            )
            raise UserError(f"recipe.problem={self._name} is invalid: {rule}")
