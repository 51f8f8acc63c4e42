"""Unusual recipes that must work."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recipes.tasks.classification import SequenceClassification
from runner.data.recipe import Batch, Prepared


@dataclass(frozen=True)
class Normalising(SequenceClassification):
    """Its model has a layer whose output depends on the other samples of the micro-batch."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        model = super().build_model(prepared)
        model.norm = nn.BatchNorm1d(1, affine=False)
        return model


@dataclass(frozen=True)
class Drawing(SequenceClassification):
    """Draws from every random generator during evaluation."""

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        random.random()
        np.random.rand()
        torch.rand(3)
        return super().predict(model, batch)


@dataclass(frozen=True)
class HalfUsed(SequenceClassification):
    """Its model has a layer that the loss does not depend on, such as an unused pooler."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        model = super().build_model(prepared)
        model.unread = nn.Linear(2, 2)
        return model


class Penalised(SequenceClassification):
    """The loss depends on all weights of an embedding, and not only through its rows."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(model, batch)
        weights = getattr(model, "module", model).get_input_embeddings().weight
        return loss_sum + 0.1 * count * weights.square().sum(), count


class SometimesUsed(HalfUsed):
    """The loss of every other micro-batch depends on that layer."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(model, batch)
        unwrapped = getattr(model, "module", model)
        calls = unwrapped.calls = getattr(unwrapped, "calls", 0) + 1
        if calls % 2:
            loss_sum = loss_sum + unwrapped.unread(torch.ones(1, 2, dtype=loss_sum.dtype)).sum() * 0.0
        return loss_sum, count


@dataclass(frozen=True)
class CountedRows(SequenceClassification):
    """Its model counts the rows that it has seen, and nothing depends on that."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        model = super().build_model(prepared)
        model.register_buffer("rows_seen", torch.zeros(()), persistent=False)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        unwrapped = getattr(model, "module", model)
        unwrapped.rows_seen += len(batch["labels"])
        return super().loss(model, batch)


@dataclass(frozen=True)
class Pinned(SequenceClassification):
    """Can only be built where bits are pinned: two threads, and torch's deterministic algorithms."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled()
        return super().build_model(prepared)


@dataclass(frozen=True)
class OtherOnEachWorker(SequenceClassification):
    """Its new weights do not depend on the seed only."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        torch.seed()
        return super().build_model(prepared)


@dataclass(frozen=True)
class OnlyAnEmbedding(SequenceClassification):
    """Trains the words' vectors and nothing else."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        model: Any = super().build_model(prepared)
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
        built: nn.Module = model
        return built
