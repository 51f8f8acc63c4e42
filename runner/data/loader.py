"""Fetch and collate micro-batches in a given order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from runner.data.layout import Layout
from runner.data.recipe import Batch, Prepared, Recipe, without_targets
from runner.data.table import ROW, SEED, Table
from runner.kernels.unpadded import with_places

#: In place of a row number: a row that only completes the batch's shape and is counted nowhere.
FILLER = -1


def batches(
    table: Table,
    ids: Iterable[Sequence[int] | np.ndarray],
    recipe: Recipe,
    prepared: Prepared,
    layout: Layout,
    seeds: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Iterator[tuple[np.ndarray, Batch]]:
    """One collated CPU batch per list of row numbers, in order, with its row numbers, `FILLER` among them.

    `seeds`: in training, makes the column `SEED` from row numbers. An empty list becomes a batch of fillers only:
    models crash on batches of size 0. Rows are memory-mapped, so fetching one costs microseconds and no loader process
    is needed. Models that compute no padding need `known_places` for their forward pass.
    """
    unpads = not (recipe.computes_padding or prepared.compiles)
    lengths = np.asarray(table.column("length"))
    shortest = int(np.argmin(lengths))
    for samples in ids:
        wanted = np.full(layout.rows or max(len(samples), 1), shortest, dtype=np.int64)
        wanted[: len(samples)] = samples
        is_filler = np.arange(len(wanted)) >= len(samples)
        rows = table[wanted.tolist()]
        if seeds is not None:
            rows[SEED] = seeds(rows[ROW])
        batch = recipe.collate(rows, prepared, layout.length(int(lengths[wanted].max())))
        batch = without_targets(batch, is_filler)
        yield np.where(is_filler, FILLER, rows[ROW]), with_places(batch) if unpads else batch
