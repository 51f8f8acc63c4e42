"""Predict and evaluate every held-out sample exactly once, for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.config.choices import ShardingKind
from runner.config.schema import Config
from runner.data.layout import layout
from runner.data.loader import FILLER, batches
from runner.data.recipe import Prepared, Recipe
from runner.kernels.unpadded import known_places
from runner.plan.order import deal
from runner.train.precision import Precision

#: Micro-batches whose predictions stay on the device until the host fetches them together.
_FETCHED_TOGETHER = 16


@dataclass(frozen=True)
class Predictor:
    """Predicts with a model on all workers, each with micro-batches of at most `evaluation.micro_batch` samples."""

    config: Config
    recipe: Recipe
    model: nn.Module
    backend: Backend
    precision: Precision

    def evaluate(
        self,
        prepared: Prepared,
        progress: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> tuple[dict[str, float], Tensor] | None:
        """The recipe's metrics over the evaluation part, the same on every worker, and what `predict` returns."""
        predictions = self.predict(prepared, progress, stop)
        if predictions is None:
            return None
        metrics: dict[str, float] = self.backend.broadcast_object(
            self.recipe.metrics(predictions, prepared.eval) if self.backend.rank == 0 else None
        )
        return metrics, predictions

    @torch.no_grad()
    def predict(
        self,
        prepared: Prepared,
        progress: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Tensor | None:
        """The recipe's predictions for the evaluation part in sample order, fp64 on every worker's CPU. A collective.

        `progress(done, total)` is called with this worker's micro-batches: at the start, and after each. None if
        `stop()` was true on a worker before one of them; with sharded weights it must be the same on all.

        Samples are sorted by length before they are dealt, which keeps padding small and workers balanced. Predictions
        are put back into sample order, so that metrics do not depend on the number of workers.
        """
        table, backend = prepared.eval, self.backend
        lengths = np.asarray(table.column("length"))
        mine, micro_batches, most_rows = self._dealt(np.argsort(lengths, kind="stable"))
        shapes = layout(lengths, most_rows, self.config.device.length_buckets, backend.compiles)

        was_training = self.model.training
        self.model.eval()
        parts: list[Tensor] = []
        on_device: list[tuple[np.ndarray, Tensor]] = []
        if progress is not None:
            progress(0, len(micro_batches))
        complete = True
        fed = backend.feed(batches(table, micro_batches, self.recipe, prepared, shapes))
        for done, (ids, batch) in enumerate(fed, 1):
            if stop is not None and stop():
                complete = False
                break
            with backend.forward_pass(), self.precision.autocast(), known_places(batch):
                on_device.append((ids, self.recipe.predict(self.model, batch)))
            backend.mark_step()
            if len(on_device) == _FETCHED_TOGETHER:
                parts += _fetch(on_device)
                on_device = []
            if progress is not None:
                progress(done, len(micro_batches))
        parts += _fetch(on_device)
        self.model.train(was_training)

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

    def _dealt(self, by_length: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], int]:
        """This worker's samples, the same in micro-batches, and the size of these."""
        rank, workers, rows = self.backend.rank, self.backend.world_size, self.config.evaluation.micro_batch
        if self.config.equivalence.is_identical:  # form batches first: these have the same bits on any worker
            micro_batches = _cut(by_length, rows)[rank::workers]
            mine = np.concatenate([by_length[:0], *micro_batches])
        else:
            mine = deal(by_length, workers, rank)
            rows = min(rows, -(-len(by_length) // workers))  # no worker has more
            micro_batches = _cut(mine, rows)
        if self.config.sharding.kind is not ShardingKind.none:  # all run the same number of forward passes: fillers
            most = -(-len(deal(by_length, workers, 0)) // rows)
            micro_batches += [np.zeros(0, dtype=np.int64)] * (most - len(micro_batches))
        return mine, micro_batches, rows


def _cut(ids: np.ndarray, size: int) -> list[np.ndarray]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def _fetch(predictions: Sequence[tuple[np.ndarray, Tensor]]) -> list[Tensor]:
    """Predictions as fp64 on the CPU. Filler rows are removed here, so that the device sees few shapes."""
    return [rows.cpu().double()[torch.from_numpy(ids != FILLER)] for ids, rows in predictions]
