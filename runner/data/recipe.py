"""The protocol between the core and a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from runner.data.cache import Cache
from runner.data.table import Table

#: Targets at this value carry no loss: padding tokens, and every row of a filler batch.
IGNORED_LABEL = -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class DataFacts:
    """What is known of the data before a worker starts.

    `train_samples`, `eval_samples`: rows of the two tables, which is what batches are counted in. `digest`: over every
    text and label, in order. `source`: where they came from, in words. `unit`: what a row is, in the plural. `groups`:
    what several rows can belong to, in the plural, and how many of these there are, for a recipe whose tables have a
    column `group`. `estimated`: the counts are not those of data that were read.
    """

    train_samples: int
    eval_samples: int
    digest: str
    source: str
    unit: str = "samples"
    groups: str | None = None
    train_groups: int | None = None
    eval_groups: int | None = None
    estimated: bool = False


@dataclass(frozen=True)
class Prepared:
    """Tokenised data on disk, memory-mapped by every worker, and what the model must know of them."""

    train: Table
    eval: Table
    properties: Mapping[str, Any]
    folder: Path

    @staticmethod
    def load(folder: Path) -> Prepared:
        """Map a cache entry that a recipe's `prepare` made: `train/`, `eval/` and `properties.json`."""
        properties = json.loads((folder / "properties.json").read_text())
        return Prepared(Table(folder / "train"), Table(folder / "eval"), properties, folder)


class Recipe(Protocol):
    """What to train. Everything about workers, batches, precision and synchronisation is the core's business.

    Both tables have a column `length` (tokens of the row, for sorting and padding statistics) and `label_count` (how
    many targets of the row carry a loss: 1 for a labelled sample, the labelled tokens for a token-level loss). Where
    several rows belong together, as a question's windows do, a column `group` numbers what they belong to from 0.

    A recipe whose training drops no units may say so by an attribute `has_dropout = False`, for the certificate. What
    is to be known of a run beside its results it may say in `notes`, a sentence each: they are shown and logged. One
    that knows the size of data which are not here may have a method `expected_facts() -> DataFacts | None`, for
    `runner.plan`; it is called when `facts` raised Unavailable.
    """

    @property
    def metric_names(self) -> Sequence[str]:
        """The names that `metrics` will use."""
        ...

    @property
    def minimised(self) -> Sequence[str]:
        """Those of them that are the better the smaller they are."""
        ...

    def facts(self, cache: Cache) -> DataFacts:
        """Read and check the raw data; tokenise them only if nothing less tells how many rows there are.

        Called in the parent, before any run's folder exists. Raises UserError, and Unavailable for data or a tokenizer
        that are not here.
        """
        ...

    def check_model(self) -> None:
        """Refuse a model that cannot be had, without loading it. Raises UserError, Unavailable if it is not here."""
        ...

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        """Tokenise, or find the tokenised data in the cache. Called on one worker of each machine."""
        ...

    def build_model(self, prepared: Prepared) -> nn.Module:
        """The model in fp32 on the CPU; new parameters are drawn from torch's global generator."""
        ...

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        """Rows as CPU tensors, padded to `length` tokens, or to the longest row where that is None.

        The first dimension of every tensor is the row. Targets are under `labels`, `IGNORED_LABEL` where there is none.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss summed over the targets of the batch (a scalar with a gradient), and how many there were."""
        ...

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Predictions of shape [rows, ...], the trailing shape being the same for every batch."""
        ...

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        """Metrics over the whole evaluation part, predictions in sample order; rates in percent."""
        ...

    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        """Leave weights and tokenizer in `folder`, loadable by `from_pretrained`."""
        ...


def without_targets(batch: Batch, rows: np.ndarray) -> Batch:
    """The same batch with no target left in `rows` (bool): they run through the model and count nowhere."""
    if not rows.any():
        return batch
    labels = batch["labels"].clone()
    labels[torch.from_numpy(rows)] = IGNORED_LABEL
    return {**batch, "labels": labels}


def label_counts(table: Table) -> np.ndarray:
    """Targets that carry a loss, for each row of `table`; int64 of shape [rows]."""
    return np.asarray(table.column("label_count"), dtype=np.int64)
