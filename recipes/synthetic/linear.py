"""One linear layer on 64 random numbers: the model on which an article compares ways of splitting a batch by hand.

It trains it on one device, with data parallel, with distributed data parallel and with gradient accumulation, and
prints the final weights of each. Only the data are random: every weight starts at 1.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared, Recipe
from runner.data.table import Table, write_table
from runner.errors import UserError

#: Rows of the data, and numbers in each of them.
_ROWS, _INPUTS = 8, 8

#: The article sums the outputs of a batch of this many rows and averages over batches.
_ROWS_PER_SUM = 4

#: Tables hold integers. The numbers of `torch.rand` are multiples of 2**-24, so this factor loses nothing.
_SCALE = 2**24

_WEIGHTS = "model.safetensors"


def _inputs() -> Tensor:
    """The article's data: the first `torch.rand` after `torch.manual_seed(0)`."""
    return torch.rand(_ROWS, _INPUTS, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class LinearLayer(Recipe):
    """Minimise the sum of the outputs of one layer. The evaluation set is the training set.

    `weights`: a file to start from, in place of ones.
    """

    weights: str | None = None

    @property
    def metric_names(self) -> Sequence[str]:
        return ["loss"]

    @property
    def minimised(self) -> Sequence[str]:
        return ["loss"]

    @property
    def has_dropout(self) -> bool:
        return False

    def facts(self, cache: Cache) -> DataFacts:
        digest = hashlib.sha256(json.dumps(_inputs().tolist()).encode()).hexdigest()
        return DataFacts(_ROWS, _ROWS, digest, "torch.rand, seed 0")

    def check_model(self) -> None:
        """Nothing can be missing."""

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        return cache.get({"task": "linear", "data": facts.digest}, self._write)

    def _write(self, folder: Path) -> None:
        inputs = (_inputs().double() * _SCALE).long().tolist()
        for name in ("train", "eval"):
            columns = {"inputs": inputs, "length": [_INPUTS] * _ROWS, "label_count": [1] * _ROWS}
            write_table(folder / name, columns)
        (folder / "properties.json").write_text("{}")

    def build_model(self, prepared: Prepared) -> nn.Module:
        model = nn.Linear(_INPUTS, 1, bias=False)
        nn.init.ones_(model.weight)
        if self.weights is not None:
            from safetensors.torch import load_file

            model.load_state_dict(load_file(self.weights))
        return model

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        inputs = torch.stack([torch.from_numpy(row.astype("int64")) for row in rows["inputs"]])
        # There is no target. The label only distinguishes rows that count from those of a filler batch.
        return {"inputs": inputs.float() / _SCALE, "labels": torch.zeros(len(inputs), dtype=torch.int64)}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        labelled = batch["labels"] != IGNORED_LABEL
        # The article divides the sum of outputs by samples ÷ 4, which may not be an integer. 4 × the sum over the
        # number of samples is bitwise equal, since 4 is a power of two.
        return _ROWS_PER_SUM * _outputs(model, batch).where(labelled, 0).sum(), labelled.sum()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Outputs, [rows]."""
        return _outputs(model, batch)

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        return {"loss": _ROWS_PER_SUM * float(predictions.mean())}

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        return {"loss": _ROWS_PER_SUM * predictions}

    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), folder / _WEIGHTS)

    def from_saved(self, model: str, file: str | None = None) -> LinearLayer:
        if file is not None:
            raise UserError(f"--input={file} cannot be read: the data of this recipe are generated; leave it out")
        weights = Path(model) / _WEIGHTS
        if not weights.is_file():
            raise UserError(f"{model} has no {_WEIGHTS}: give the folder of a run, or of the model that it saved")
        return dataclasses.replace(self, weights=str(weights))

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        return {"output": predictions.tolist()}


def _outputs(model: nn.Module, batch: Batch) -> Tensor:
    # Inputs and, under autocast, outputs are cast to the precision of the weights.
    dtype = next(model.parameters()).dtype
    outputs: Tensor = model(batch["inputs"].to(dtype))
    return outputs.squeeze(-1).to(dtype)
