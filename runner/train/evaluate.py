"""Evaluate every held-out sample once, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.data.layout import layout
from runner.data.loader import FILLER, batches
from runner.data.recipe import Prepared, Recipe
from runner.folder.eval_progress import ignore_progress
from runner.plan.order import deal
from runner.train.precision import Precision

#: Micro-batches after which the host waits for predictions: so many of them the device has to hold.
_FETCHED_TOGETHER = 16


@torch.no_grad()
def evaluate(
    recipe: Recipe,
    prepared: Prepared,
    model: nn.Module,
    backend: Backend,
    precision: Precision,
    micro_batch: int,
    length_buckets: Sequence[int] | None,
    progress: Callable[[int, int], None] = ignore_progress,
) -> dict[str, float]:
    """The recipe's metrics over the evaluation part, the same on every worker. A collective.

    `progress`: told how many of this worker's micro-batches are done, from none to all.

    Samples are dealt by length, so that padding is small and workers are even; predictions are put back into sample
    order before a metric sees them, so the metric cannot depend on the dealing.
    """
    table = prepared.eval
    lengths = np.asarray(table.column("length"))
    by_length = np.argsort(lengths, kind="stable")
    mine = deal(by_length, backend.world_size, backend.rank)
    micro_batch = min(micro_batch, -(-len(table) // backend.world_size))  # no worker has more
    micro_batches = [mine[i : i + micro_batch] for i in range(0, len(mine), micro_batch)]
    shapes = layout(lengths, micro_batch, length_buckets, backend.compiles)

    was_training = model.training
    model.eval()
    parts: list[Tensor] = []
    on_device: list[tuple[np.ndarray, Tensor]] = []
    progress(0, len(micro_batches))
    for done, (ids, batch) in enumerate(backend.feed(batches(table, micro_batches, recipe, prepared, shapes)), 1):
        with backend.forward_pass(), precision.autocast():
            on_device.append((ids, recipe.predict(model, batch)))
        backend.mark_step()
        if len(on_device) == _FETCHED_TOGETHER:
            parts += _fetched(on_device)
            on_device = []
        progress(done, len(micro_batches))
    parts += _fetched(on_device)
    model.train(was_training)

    order = torch.cat(backend.gather_rows(torch.from_numpy(mine)))
    # A worker without a sample still has to say what shape a prediction has: it takes part with zero rows.
    shape = backend.share(list(parts[0].shape[1:]) if parts else None)
    own = torch.cat(parts) if parts else torch.zeros((0, *shape), dtype=torch.float64)
    gathered = torch.cat(backend.gather_rows(own))
    assert len(order) == len(table), (len(order), len(table))
    predictions = torch.empty_like(gathered)
    predictions[order] = gathered
    metrics: dict[str, float] = backend.share(recipe.metrics(predictions, table) if backend.rank == 0 else None)
    return metrics


def _fetched(predictions: Sequence[tuple[np.ndarray, Tensor]]) -> list[Tensor]:
    """Without the fillers, which are cut off here only: the device sees few shapes."""
    return [rows.cpu().double()[torch.from_numpy(ids != FILLER)] for ids, rows in predictions]
