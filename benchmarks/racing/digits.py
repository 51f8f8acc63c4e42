"""Handwritten digits (UCI's, in scikit-learn: 1,797 images of 8 × 8 pixels): a grid of small runs takes minutes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared, Recipe
from runner.data.table import Table, write_table

_TRAIN_ROWS, _PIXELS, _CLASSES = 1024, 64, 10


@dataclass(frozen=True)
class Digits(Recipe):
    """A perceptron with one hidden layer of `hidden_size` units. `wrong_labels`: their share in the training data."""

    hidden_size: int = 32
    dropout: float = 0.2
    wrong_labels: float = 0.0

    @property
    def metric_names(self) -> Sequence[str]:
        return ["accuracy"]

    @property
    def minimised(self) -> Sequence[str]:
        return []

    @property
    def has_dropout(self) -> bool:
        return self.dropout > 0

    def facts(self, cache: Cache) -> DataFacts:
        return DataFacts(_TRAIN_ROWS, 1797 - _TRAIN_ROWS, f"digits {self.wrong_labels}", "sklearn.datasets.load_digits")

    def check_model(self) -> None:
        """Nothing can be missing."""

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        return cache.get({"task": "digits", "data": facts.digest}, self._write)

    def _write(self, folder: Path) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        generator = np.random.default_rng(0)
        order = generator.permutation(len(images))
        images, labels = images[order].astype(int), labels[order].astype(int)
        wrong = generator.random(_TRAIN_ROWS) < self.wrong_labels
        labels[:_TRAIN_ROWS][wrong] = generator.integers(0, _CLASSES, int(wrong.sum()))
        for name, rows in (("train", slice(_TRAIN_ROWS)), ("eval", slice(_TRAIN_ROWS, None))):
            count = len(labels[rows])
            columns = {"pixels": list(images[rows]), "label": labels[rows]}
            write_table(folder / name, {**columns, "length": [_PIXELS] * count, "label_count": [1] * count})
        (folder / "properties.json").write_text("{}")

    def build_model(self, prepared: Prepared) -> nn.Module:
        hidden = nn.Sequential(nn.Linear(_PIXELS, self.hidden_size), nn.ReLU(), nn.Dropout(self.dropout))
        return nn.Sequential(hidden, nn.Linear(self.hidden_size, _CLASSES))

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        pixels = torch.from_numpy(np.stack(list(rows["pixels"]))).float() / 16
        return {"pixels": pixels, "labels": torch.from_numpy(np.asarray(rows["label"]))}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        summed = cross_entropy(model(batch["pixels"]), labels, ignore_index=IGNORED_LABEL, reduction="sum")
        return summed, (labels != IGNORED_LABEL).sum()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores, [rows, classes]."""
        scores: Tensor = model(batch["pixels"])
        return scores

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        return {"accuracy": 100 * float(np.mean(predictions.argmax(-1).numpy() == table.column("label")))}

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        right = predictions.argmax(-1) == torch.from_numpy(table.column("label").copy())
        return {"accuracy": 100 * right.double()}

    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), folder / "model.safetensors")

    def from_saved(self, model: str, file: str | None = None) -> Digits:
        return dataclasses.replace(self)

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        return {"label": predictions.argmax(-1).tolist()}
