"""Recipes that go wrong in a worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recipes.tasks.classification import SequenceClassification
from runner.data.recipe import Batch, Prepared
from runner.errors import UserError


@dataclass(frozen=True)
class BrokenRecipe(SequenceClassification):
    """Its last worker fails in the middle of training, while the others wait for it in a collective."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if os.environ["RANK"] == "1":
            raise RuntimeError("broken on purpose")
        return super().loss(model, batch)


@dataclass(frozen=True)
class RepeatingRecipe(SequenceClassification):
    """Its table gives row 0 for row 1, as a broken store or loader might."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        fetch = type(prepared.train).__getitem__

        class Repeating(type(prepared.train)):  # type: ignore[misc]
            def __getitem__(self, rows: Any) -> Any:
                return fetch(self, [0 if row == 1 else row for row in rows])

        object.__setattr__(prepared, "train", Repeating(prepared.train.folder))
        return super().build_model(prepared)


@dataclass(frozen=True)
class RefusingRecipe(SequenceClassification):
    """Finds a mistake of the user only when it builds the model."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        raise UserError("recipe.model=x cannot be: refused on purpose")


@dataclass(frozen=True)
class MiscountingRecipe(SequenceClassification):
    """Counts one loss term too many in every micro-batch."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(model, batch)
        return loss_sum, count + 1
