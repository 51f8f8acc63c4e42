"""The interface between the runner and a recipe."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.data.cache import Cache
from runner.data.table import Table
from runner.errors import UserError

#: Targets with this value have no loss: padding tokens, and every row of a filler batch.
IGNORED_LABEL = -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class DataFacts:
    """Facts about the data that are known before a worker starts.

    `train_samples`, `eval_samples`: rows of the two tables, the unit of batch sizes. `digest`: over every sample
    and label, in order. `source`: where the data came from, for people. `unit`: what a row is, in the plural. `groups`:
    what rows are grouped by, in the plural, and the numbers of groups, if the tables have a column `group`.
    `label_names`: of the classes, in the order of their numbers, if rows have classes. `notes`: sentences to show with
    a run's results, such as what was inferred from the data. `constant`: by metric, its value for the best answer that
    is the same for every evaluation row, where it is known.
    """

    train_samples: int
    eval_samples: int
    digest: str
    source: str
    unit: str = "samples"
    groups: str | None = None
    train_groups: int | None = None
    eval_groups: int | None = None
    label_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    constant: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """Data on disk as the recipe has prepared them, memory-mapped by every worker.

    `properties`: what the model must know of them.

    `train` is empty if a saved model is only evaluated. `compiles`: whether the device compiles a program for every
    shape of a batch.
    """

    train: Table
    eval: Table
    properties: Mapping[str, Any]
    folder: Path
    compiles: bool = False

    @staticmethod
    def load(folder: Path) -> Prepared:
        """Map a cache entry written by a recipe's `prepare`: `train/`, `eval/` and `properties.json`."""
        properties = json.loads((folder / "properties.json").read_text())
        return Prepared(Table(folder / "train"), Table(folder / "eval"), properties, folder)


class Recipe(ABC):
    """A model, its data, its loss and its metrics. Workers, batches, precision and synchronisation are not its concern.

    Both tables have a column `length` (tokens of the row, for sorting and padding statistics; 1 where all rows have one
    shape) and `label_count` (targets of the row that carry a loss: 1 for a labelled sample, the labelled tokens for a
    token-level loss). If several rows belong together, such as the windows of a question, a column `group` numbers the
    groups from 0.
    """

    @property
    def has_dropout(self) -> bool:
        """True if training uses dropout; the certificate compares dropout streams then."""
        return True

    @property
    def notes(self) -> Sequence[str]:
        """Sentences that are shown and logged with a run's results, such as that the weights are random."""
        return ()

    @property
    def can_unpad(self) -> bool:
        """True if `recipe.padding=none` would have the model compute no padding."""
        return False

    @property
    def computes_padding(self) -> bool:
        """True if the model computes the padding of its batches, where it could be avoided."""
        return True

    @property
    @abstractmethod
    def metric_names(self) -> Sequence[str]:
        """The names that `metrics` returns."""

    def metrics_of(self, facts: DataFacts) -> Sequence[str]:
        """The names that `metrics` returns for these data, if that depends on them."""
        return self.metric_names

    @property
    @abstractmethod
    def minimised(self) -> Sequence[str]:
        """The metrics for which lower is better."""

    @abstractmethod
    def facts(self, cache: Cache) -> DataFacts:
        """Read and check the raw data; prepare them only if the number of rows, or what is wrong, is known only then.

        Called in the parent, before a run's folder exists. Raises UserError, and Unavailable for data or a tokenizer
        that are not on this machine.
        """

    @abstractmethod
    def check_model(self) -> None:
        """Check that the model can be loaded, without loading it. Raises UserError, Unavailable."""

    @abstractmethod
    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        """Make the tables, such as of token ids, or find them in the cache. Called on one worker of each machine.

        `properties.json` may say under `truncated` what was truncated, which is reported at the end of a run:
        {"what": "texts", "setting": "recipe.max_length", "tokens": 128, "train": [12, 8551], "eval": [0, 1043]}, where
        a pair is how many of how many; or a list of these. Long work reports to `cache.progress`.
        """

    @abstractmethod
    def build_model(self, prepared: Prepared) -> nn.Module:
        """The model in fp32 on the CPU; new parameters are drawn from torch's global generator.

        A pretrained model may list those in its attribute `new_weights`: an adapter trains them like the head.
        """

    @abstractmethod
    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        """Rows as CPU tensors, padded to `length` tokens, by default to the longest row.

        The first dimension of every tensor is the row. Targets are under `labels`, `IGNORED_LABEL` where there is none,
        or nan if they are floats. In training `rows` has the column `SEED`, from which alone a recipe may draw what is
        random, such as an augmentation.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss summed over the targets of the batch (a scalar with a gradient), and the number of targets."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Predictions of shape [rows, ...], the trailing shape being the same for every batch."""

    @abstractmethod
    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        """Metrics over the whole evaluation set, predictions in sample order; rates in percent."""

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        """Those `metrics` that can be told by row: for each row, or for each group of rows, a value; [rows].

        Their mean is the metric. `runner.compare` pairs the rows of runs by them: without, it must assume how much a
        metric would differ on other rows.
        """
        return {}

    @abstractmethod
    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        """Write weights, and what makes inputs, such as a tokenizer, to `folder`, loadable by `from_pretrained`."""

    def from_saved(self, model: str, file: str | None = None) -> Recipe:
        """Return this recipe for evaluating a model that `save` wrote to the folder `model`, or one on the Hub.

        It reads no training data. `file`: predict for the samples in this file, which need no labels, instead of the
        evaluation part; `metrics` is not called then. Raises UserError, Unavailable.
        """
        raise UserError(f"{type(self).__name__} cannot evaluate a saved model: implement from_saved")

    def for_predictions(self) -> Recipe:
        """Return this recipe for `runner.predict`, whose `predict` may do more, such as generate text.

        Called on a recipe that `from_saved` returned.
        """
        return self

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """Predictions, in sample order, as named columns for people, of a recipe that `for_predictions` returned."""
        raise UserError(f"{type(self).__name__} cannot write predictions: implement prediction_columns")


def without_targets(batch: Batch, rows: np.ndarray) -> Batch:
    """Ignore the targets of `rows` (bool) of a batch: these rows run through the model and count nowhere."""
    if not rows.any():
        return batch
    labels = batch["labels"].clone()
    labels[torch.from_numpy(rows)] = torch.nan if labels.is_floating_point() else IGNORED_LABEL
    return {**batch, "labels": labels}


def label_counts(table: Table) -> np.ndarray:
    """Targets that carry a loss, for each row of `table`; int64 of shape [rows]."""
    return np.asarray(table.column("label_count"), dtype=np.int64)
