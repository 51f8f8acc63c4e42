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
    """What is known of the data before anything is tokenised. `digest`: over every text and label, in order."""

    train_samples: int
    eval_samples: int
    digest: str
    source: str


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
    many targets of the row carry a loss: 1 for a labelled sample, the labelled tokens for a token-level loss).

    A recipe whose training drops no units may say so by an attribute `has_dropout = False`, for the certificate.
    """

    @property
    def metric_names(self) -> Sequence[str]:
        """The names that `metrics` will use."""
        ...

    @property
    def minimised(self) -> Sequence[str]:
        """Those of them that are the better the smaller they are."""
        ...

    def facts(self) -> DataFacts:
        """Read and check the raw data. Called before any folder exists. Raises UserError."""
        ...

    def check_model(self) -> None:
        """Refuse a model that cannot be had, without loading it. Raises UserError."""
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
