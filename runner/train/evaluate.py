"""Predict and evaluate every held-out sample exactly once, for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.data.layout import layout
from runner.data.loader import FILLER, batches
from runner.data.recipe import Prepared, Recipe
from runner.data.unpadded import known_places
from runner.plan.order import deal
from runner.train.precision import Precision

#: Micro-batches whose predictions stay on the device until the host fetches them together.
_FETCHED_TOGETHER = 16


def evaluate(
    recipe: Recipe,
    prepared: Prepared,
    model: nn.Module,
    backend: Backend,
    precision: Precision,
    micro_batch: int,
    length_buckets: Sequence[int] | None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    collective_forward: bool = False,
    same_batches: bool = False,
) -> dict[str, float] | None:
    """The recipe's metrics over the evaluation part, the same on every worker. Arguments and None as of `predict`."""
    predictions = predict(
        *(recipe, prepared, model, backend, precision, micro_batch, length_buckets),
        *(progress, stop, collective_forward, same_batches),
    )
    if predictions is None:
        return None
    metrics: dict[str, float] = backend.broadcast_object(
        recipe.metrics(predictions, prepared.eval) if backend.rank == 0 else None
    )
    return metrics


@torch.no_grad()
def predict(
    recipe: Recipe,
    prepared: Prepared,
    model: nn.Module,
    backend: Backend,
    precision: Precision,
    micro_batch: int,
    length_buckets: Sequence[int] | None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    collective_forward: bool = False,
    same_batches: bool = False,
) -> Tensor | None:
    """The recipe's predictions for the evaluation part in sample order, fp64 on the CPU of every worker. A collective.

    `progress(done, total)` is called with this worker's micro-batches: at the start, and after each. None if `stop()`
    was true on a worker before one of them. `collective_forward`: whether all workers need the same number of forward
    passes; `stop` has to have the same result on all of them then. `same_batches`: form batches first and deal
    these, so that predictions have the same bits on any number of workers.

    Samples are sorted by length before they are dealt, which keeps padding small and workers balanced. Predictions are
    put back into sample order, so that metrics do not depend on the number of workers.
    """
    table = prepared.eval
    lengths = np.asarray(table.column("length"))
    by_length = np.argsort(lengths, kind="stable")
    if same_batches:
        micro_batches = _cut(by_length, micro_batch)[backend.rank :: backend.world_size]
        mine = np.concatenate([by_length[:0], *micro_batches])
    else:
        mine = deal(by_length, backend.world_size, backend.rank)
        micro_batch = min(micro_batch, -(-len(table) // backend.world_size))  # no worker has more
        micro_batches = _cut(mine, micro_batch)
    if collective_forward:  # fillers
        most = -(-len(deal(by_length, backend.world_size, 0)) // micro_batch)
        micro_batches += [np.zeros(0, dtype=np.int64)] * (most - len(micro_batches))
    shapes = layout(lengths, micro_batch, length_buckets, backend.compiles)

    was_training = model.training
    model.eval()
    parts: list[Tensor] = []
    on_device: list[tuple[np.ndarray, Tensor]] = []
    if progress is not None:
        progress(0, len(micro_batches))
    complete = True
    for done, (ids, batch) in enumerate(backend.feed(batches(table, micro_batches, recipe, prepared, shapes)), 1):
        if stop is not None and stop():
            complete = False
            break
        with backend.forward_pass(), precision.autocast(), known_places(batch):
            on_device.append((ids, recipe.predict(model, batch)))
        backend.mark_step()
        if len(on_device) == _FETCHED_TOGETHER:
            parts += _fetch(on_device)
            on_device = []
        if progress is not None:
            progress(done, len(micro_batches))
    parts += _fetch(on_device)
    model.train(was_training)

    orders, all_complete = zip(*backend.all_gather_object((torch.from_numpy(mine), complete)), strict=True)
    if not all(all_complete):
        return None
    order = torch.cat(orders)
    # A worker without samples contributes zero rows, and learns the shape of a row from rank 0.
    shape = backend.broadcast_object(list(parts[0].shape[1:]) if parts else None)
    own = torch.cat(parts) if parts else torch.zeros((0, *shape), dtype=torch.float64)
    gathered = torch.cat(backend.all_gather_object(own))
    assert len(order) == len(table), (len(order), len(table))
    predictions = torch.empty_like(gathered)
    predictions[order] = gathered
    return predictions


def _cut(ids: np.ndarray, size: int) -> list[np.ndarray]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def _fetch(predictions: Sequence[tuple[np.ndarray, Tensor]]) -> list[Tensor]:
    """Predictions as fp64 on the CPU. Filler rows are removed here, so that the device sees few shapes."""
    return [rows.cpu().double()[torch.from_numpy(ids != FILLER)] for ids, rows in predictions]
