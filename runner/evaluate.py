"""Evaluate every held-out sample once, whatever the number of workers."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from runner.backends import Backend
from runner.data.loader import batches
from runner.data.order import deal
from runner.precision import Precision
from runner.recipe import Prepared, Recipe


@torch.no_grad()
def evaluate(
    recipe: Recipe,
    prepared: Prepared,
    model: nn.Module,
    backend: Backend,
    precision: Precision,
    micro_batch: int,
) -> dict[str, float]:
    """The recipe's metrics over the evaluation part, the same on every worker. A collective.

    Samples are dealt by length, so that padding is small and workers are even; predictions are put back into sample
    order before a metric sees them, so the metric cannot depend on the dealing.
    """
    table = prepared.eval
    by_length = np.argsort(np.asarray(table.column("length")), kind="stable")
    mine = deal(by_length, backend.world_size, backend.rank)
    micro_batches = [mine[i : i + micro_batch].tolist() for i in range(0, len(mine), micro_batch)]

    was_training = model.training
    model.eval()
    parts = []
    loader = batches(table, micro_batches, recipe, prepared, pin_memory=backend.device.type == "cuda")
    for _, batch in loader:
        on_device = {name: tensor.to(backend.device, non_blocking=True) for name, tensor in batch.items()}
        with precision.autocast():
            parts.append(recipe.predict(model, on_device).cpu().double())
    model.train(was_training)

    ids = torch.cat(backend.gather_rows(torch.from_numpy(mine)))
    # A worker without a sample still has to say what shape a prediction has: it takes part with zero rows.
    shape = backend.share(list(parts[0].shape[1:]) if parts else None)
    own = torch.cat(parts) if parts else torch.zeros((0, *shape), dtype=torch.float64)
    gathered = torch.cat(backend.gather_rows(own))
    assert len(ids) == len(table), (len(ids), len(table))
    predictions = torch.empty_like(gathered)
    predictions[ids] = gathered
    metrics: dict[str, float] = backend.share(recipe.metrics(predictions, table) if backend.rank == 0 else None)
    return metrics
