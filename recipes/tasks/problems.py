"""What a text gets: one of several classes, any number of them, or a number. Each has its targets, loss and metrics."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from recipes.tasks.row_metrics import row_metrics
from runner.data.recipe import IGNORED_LABEL

#: For each text its class, its classes in ascending order, or its number. Classes are numbered from 0.
Labels = Sequence[int] | Sequence[tuple[int, ...]] | Sequence[float]

#: A function of logits [samples, outputs] and labels, as `Problem.tensor` returns them.
Metric = Callable[[Tensor, Tensor], float]
_OfClasses = Callable[[Tensor, Tensor, Tensor], Tensor]


class Problem(ABC):
    """`problem_type`: transformers' word for it. `metrics`: by their names in configuration and MLflow."""

    problem_type: ClassVar[str]
    metrics: ClassVar[Mapping[str, Metric]]
    minimised: ClassVar[Sequence[str]] = ("loss",)

    @abstractmethod
    def fitting(self, classes: int) -> list[str]:
        """The metrics that are shown for this number of classes unless others are configured."""

    @abstractmethod
    def undefined(self, used: Sequence[str], names: Sequence[str], labels: Any) -> str | None:
        """Why one of the metrics `used` is undefined for these classes and evaluation labels; None if none is."""

    def constant(self, labels: Any) -> dict[str, float]:
        """The metrics, where they are known, of the best answer that is the same for all rows with these labels."""
        return {}

    def row_metrics(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The metrics that can be told by row, as `Recipe.row_metrics`."""
        return {}

    def outputs(self, names: Sequence[str]) -> int:
        """How many logits the model has."""
        return len(names)

    @abstractmethod
    def columns(self, labels: Any, rows: int, names: Sequence[str]) -> dict[str, Sequence[Any]]:
        """The columns `label` and `label_count` of a table. `labels`: `Labels`, or None if they are not known."""

    @abstractmethod
    def tensor(self, label: Any) -> Tensor:
        """The column `label` of some rows; where labels are not known, targets are those that `Batch` ignores."""

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over the targets that are known, and their number."""

    @abstractmethod
    def predictions(self, logits: Tensor, labels: Any, names: Sequence[str]) -> dict[str, Sequence[Any]]:
        """Predictions, labels if they are known, and probabilities, as columns for people."""


def _by_row(predicted: Tensor, labels: Tensor, **metrics: _OfClasses) -> dict[str, Tensor]:
    """`metrics`: functions of the shares of rows in which each class is right, is predicted, and is true.

    `predicted`, `labels`: which classes each row has, of shape [rows, classes].
    """

    def of_means(metric: _OfClasses) -> Callable[[Tensor], Tensor]:
        return lambda means: metric(*means.chunk(3))

    counts = torch.cat([predicted & labels, predicted, labels], dim=1)
    return row_metrics(counts, {name: of_means(metric) for name, metric in metrics.items()})


def _f1s(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    """F1 of each class in percent; 0 for one that is neither predicted nor true."""
    return 200 * right / (predicted + true).clamp(min=torch.finfo(right.dtype).tiny)


def _scikit_learn(function: str, answer: Callable[[Tensor], Tensor], scale: float = 100.0, **settings: Any) -> Metric:
    """A metric by its name in scikit-learn of what `answer` makes of logits, in percent; nan if that is not finite."""

    def metric(logits: Tensor, labels: Tensor) -> float:
        import sklearn.metrics

        answers = answer(logits)
        if not answers.isfinite().all():
            return math.nan
        return scale * float(getattr(sklearn.metrics, function)(labels, answers, **settings))

    return metric


def _mean(loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Metric:
    def metric(logits: Tensor, labels: Tensor) -> float:
        loss_sum, count = loss(logits, labels)
        return float(loss_sum / count)

    return metric


def _named(numbers: Sequence[int], names: Sequence[str]) -> list[str]:
    return [names[number] for number in numbers]


# --- one class --------------------------------------------------------------------------------------------------

#: Metrics of class 1 against class 0, for two classes only.
_BINARY = ("f1", "precision", "recall")


#: The most probable class.
_of_classes = functools.partial(_scikit_learn, answer=lambda logits: logits.argmax(-1))


def _macro_f1(logits: Tensor, labels: Tensor) -> float:
    """The mean F1, in percent, of the classes that the evaluation set has, whatever is predicted.

    scikit-learn's default adds classes that occur in predictions alone, with an F1 of 0.
    """
    return _of_classes("f1_score", average="macro", labels=labels.unique().tolist(), zero_division=0.0)(logits, labels)


def _auc(logits: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve in percent, of several classes the mean of each against the others; nan if undefined."""
    from sklearn.metrics import roc_auc_score

    classes = logits.shape[-1]
    if len(labels.unique()) < classes or not logits.isfinite().all():
        return math.nan
    if classes == 2:
        return 100 * float(roc_auc_score(labels, logits[:, 1] - logits[:, 0]))
    return 100 * float(roc_auc_score(labels, logits.double().softmax(-1), multi_class="ovr"))


def class_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropy, and the number of labels. `logits`: [targets, classes]."""
    ignored = IGNORED_LABEL
    loss_sum = cross_entropy(logits, labels, ignore_index=ignored, reduction="sum", label_smoothing=label_smoothing)
    return loss_sum, (labels != ignored).sum()


class SingleLabel(Problem):
    """One class. The loss is the cross entropy, with one target for each sample."""

    problem_type = "single_label_classification"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": _of_classes("accuracy_score"),
        "matthews": _of_classes("matthews_corrcoef"),
        "macro_f1": _macro_f1,
        "f1": _of_classes("f1_score", zero_division=0.0),
        "precision": _of_classes("precision_score", zero_division=0.0),
        "recall": _of_classes("recall_score", zero_division=0.0),
        "auc": _auc,
        "loss": _mean(class_loss),
    }

    def row_metrics(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted, true = (one_hot(classes, logits.shape[-1]).bool() for classes in (logits.argmax(-1), labels))
        found = _by_row(
            *(predicted, true),
            accuracy=lambda right, predicted, true: 100 * right.sum(),
            matthews=lambda right, predicted, true: (
                100 * (right.sum() - predicted @ true) / ((1 - predicted @ predicted) * (1 - true @ true)).sqrt()
            ),
            macro_f1=lambda right, predicted, true: _f1s(right, predicted, true)[true > 0].mean(),
        )
        if logits.shape[-1] == 2:
            found |= _by_row(
                *(predicted, true),
                f1=lambda right, predicted, true: _f1s(right, predicted, true)[1],
                precision=lambda right, predicted, true: 100 * right[1] / predicted[1],
                recall=lambda right, predicted, true: 100 * right[1] / true[1],
            )
        return {**found, "loss": cross_entropy(logits, labels, reduction="none")}

    def fitting(self, classes: int) -> list[str]:
        return [name for name in self.metrics if classes <= 2 or name not in (*_BINARY, "auc")]

    def undefined(self, used: Sequence[str], names: Sequence[str], labels: Any) -> str | None:
        for name in _BINARY:
            if name in used and len(names) != 2:
                return f"{name} is for two classes, and these data have {len(names)}; use macro_f1, also as the metric"
        missing = [] if labels is None else sorted(set(range(len(names))) - set(labels))
        if "auc" in used and missing:
            return _no_auc(f"no row of the class '{names[missing[0]]}'")
        return None

    def constant(self, labels: Any) -> dict[str, float]:
        if not labels:
            return {}
        shares = np.bincount(labels) / len(labels)
        f1 = 2 * shares / (1 + shares)  # each class for an answer of only this class
        scores = {
            "accuracy": shares.max(),
            "matthews": 0.0,
            "auc": 0.5,
            "macro_f1": f1.max() / np.count_nonzero(shares),
        }
        scores |= {"f1": f1[1]} if len(shares) == 2 else {}
        return {name: 100 * float(score) for name, score in scores.items()}

    def columns(self, labels: Any, rows: int, names: Sequence[str]) -> dict[str, Sequence[Any]]:
        known = labels is not None
        return {"label": labels if known else [IGNORED_LABEL] * rows, "label_count": [int(known)] * rows}

    def tensor(self, label: Any) -> Tensor:
        return torch.as_tensor(label, dtype=torch.int64)

    def loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return class_loss(logits, labels)

    def predictions(self, logits: Tensor, labels: Any, names: Sequence[str]) -> dict[str, Sequence[Any]]:
        shares = logits.softmax(-1)
        return {
            "predicted": _named(shares.argmax(-1).tolist(), names),
            **({} if labels is None else {"label": _named(labels, names)}),
            **_probabilities(shares, names),
        }


def _probabilities(shares: Tensor, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    return {f"probability_{name}": shares[:, number].tolist() for number, name in enumerate(names)}


def _no_auc(why: str) -> str:
    return f"auc is undefined, since recipe.data.eval has {why}; leave out auc, or use more rows"


# --- several classes --------------------------------------------------------------------------------------------


#: The classes with a probability above one half.
_of_sets = functools.partial(_scikit_learn, answer=lambda logits: (logits > 0).long())


def _auc_of_sets(logits: Tensor, labels: Tensor) -> float:
    """The mean area under the ROC curve of the classes, in percent; nan if it is undefined for one."""
    if (labels == labels[:1]).all(0).any():
        return math.nan
    return _scikit_learn("roc_auc_score", answer=Tensor.double)(logits, labels)


def _set_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    known = labels != IGNORED_LABEL
    losses = binary_cross_entropy_with_logits(logits, labels.clamp(min=0).to(logits.dtype), reduction="none")
    return torch.where(known, losses, 0).sum(), known.sum()


class MultiLabel(Problem):
    """Any number of classes, also none.

    The loss is the binary cross entropy of each class, with a target for each class of each sample: its mean is that
    of transformers. A class is predicted if its probability is above one half.
    """

    problem_type = "multi_label_classification"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "micro_f1": _of_sets("f1_score", average="micro", zero_division=0.0),
        "macro_f1": _of_sets("f1_score", average="macro", zero_division=0.0),
        "exact_match": _of_sets("accuracy_score"),
        "ranking_precision": _scikit_learn("label_ranking_average_precision_score", answer=Tensor.double),
        "auc": _auc_of_sets,
        "loss": _mean(_set_loss),
    }

    def row_metrics(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted, true = logits > 0, labels == 1
        found = _by_row(
            *(predicted, true),
            micro_f1=lambda right, predicted, true: 200 * right.sum() / (predicted.sum() + true.sum()),
            macro_f1=lambda *shares: _f1s(*shares).mean(),
        )
        losses = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
        return {**found, "exact_match": 100.0 * (predicted == true).all(1), "loss": losses.mean(1)}

    def fitting(self, classes: int) -> list[str]:
        return [name for name in self.metrics if name != "auc"]  # evaluation sets often have no row of a rare class

    def undefined(self, used: Sequence[str], names: Sequence[str], labels: Any) -> str | None:
        if "auc" in used and labels is not None:
            for number, name in enumerate(names):
                rows = sum(number in row for row in labels)
                if rows in (0, len(labels)):
                    return _no_auc(f"{'no row' if not rows else 'only rows'} of the class '{name}'")
        return None

    def columns(self, labels: Any, rows: int, names: Sequence[str]) -> dict[str, Sequence[Any]]:
        known = labels is not None
        targets = np.full((rows, len(names)), 0 if known else IGNORED_LABEL)
        for row, classes in enumerate(labels or ()):
            targets[row, list(classes)] = 1
        return {"label": list(targets), "label_count": [len(names) * known] * rows}

    def tensor(self, label: Any) -> Tensor:
        return torch.from_numpy(np.stack(label).astype(np.int64))

    def loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return _set_loss(logits, labels)

    def predictions(self, logits: Tensor, labels: Any, names: Sequence[str]) -> dict[str, Sequence[Any]]:
        chosen = [row.nonzero().flatten().tolist() for row in logits > 0]
        return {
            "predicted": [_named(row, names) for row in chosen],
            **({} if labels is None else {"label": [_named(row, names) for row in labels]}),
            **_probabilities(logits.sigmoid(), names),
        }


# --- a number ---------------------------------------------------------------------------------------------------


#: The predicted numbers.
_of_numbers = functools.partial(_scikit_learn, answer=lambda logits: logits[:, 0])


def _correlation(function: str) -> Metric:
    """A correlation coefficient by its name in scipy, in percent; 0 if all predictions are equal."""

    def metric(logits: Tensor, labels: Tensor) -> float:
        import scipy.stats

        numbers = logits[:, 0]
        if not numbers.isfinite().all():
            return math.nan
        if (numbers == numbers[0]).all():
            return 0.0
        return 100 * float(getattr(scipy.stats, function)(numbers.numpy(), labels.numpy()).statistic)

    return metric


def _squared_error(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    known = ~labels.isnan()
    errors = torch.where(known, logits[:, 0] - labels.to(logits.dtype), 0)
    return errors.square().sum(), known.sum()


class Regression(Problem):
    """A number. The loss is the squared error, with one target for each sample."""

    problem_type = "regression"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "pearson": _correlation("pearsonr"),
        "spearman": _correlation("spearmanr"),
        "mse": _of_numbers("mean_squared_error", scale=1),
        "mae": _of_numbers("mean_absolute_error", scale=1),
        "r2": _of_numbers("r2_score"),
        "loss": _mean(_squared_error),
    }
    minimised = ("mse", "mae", "loss")

    def row_metrics(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        errors = logits[:, 0] - labels.to(logits.dtype)
        return {"mse": errors.square(), "mae": errors.abs(), "loss": errors.square()}

    def fitting(self, classes: int) -> list[str]:
        return list(self.metrics)

    def undefined(self, used: Sequence[str], names: Sequence[str], labels: Any) -> str | None:
        relative = [name for name in ("pearson", "spearman", "r2") if name in used]
        if relative and labels is not None and len(set(labels)) == 1:
            return (
                f"{relative[0]} is undefined, since all rows of recipe.data.eval have the number {labels[0]:g}; use mse"
            )
        return None

    def constant(self, labels: Any) -> dict[str, float]:
        return {"pearson": 0.0, "spearman": 0.0, "r2": 0.0}

    def outputs(self, names: Sequence[str]) -> int:
        return 1

    def columns(self, labels: Any, rows: int, names: Sequence[str]) -> dict[str, Sequence[Any]]:
        known = labels is not None
        numbers = np.asarray(labels if known else [math.nan] * rows, dtype=np.float64)
        return {"label": numbers, "label_count": [int(known)] * rows}  # type: ignore[dict-item]  # an array is one

    def tensor(self, label: Any) -> Tensor:
        return torch.as_tensor(label, dtype=torch.float64)

    def loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return _squared_error(logits, labels)

    def predictions(self, logits: Tensor, labels: Any, names: Sequence[str]) -> dict[str, Sequence[Any]]:
        return {"predicted": logits[:, 0].tolist(), **({} if labels is None else {"label": list(labels)})}


#: `recipe.problem` -> what it is.
PROBLEMS: Mapping[str, Problem] = {
    "single_label": SingleLabel(),
    "multi_label": MultiLabel(),
    "regression": Regression(),
}
