"""Fetch and collate micro-batches in a given order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from runner.data.table import ROW, Table
from runner.recipe import Batch, Prepared, Recipe


class _Collate:
    def __init__(self, recipe: Recipe, prepared: Prepared) -> None:
        self.recipe = recipe
        self.prepared = prepared

    def __call__(self, rows: Mapping[str, Any]) -> tuple[np.ndarray, Batch]:
        return rows[ROW], self.recipe.collate(rows, self.prepared)


def batches(
    table: Table, ids: Sequence[Sequence[int]], recipe: Recipe, prepared: Prepared, *, pin_memory: bool
) -> Iterator[tuple[np.ndarray, Batch]]:
    """One collated CPU batch per list of row numbers, in order, with the numbers of the rows that it was made from.

    Rows are already tokenised and memory-mapped, so fetching one costs microseconds and no loader process is started.
    """
    loader: DataLoader[Any] = DataLoader(
        table,  # type: ignore[arg-type]  # a Table is fetched by lists of rows, which torch's stubs do not know
        batch_sampler=ids,  # type: ignore[arg-type]  # any sequence of lists is one
        collate_fn=_Collate(recipe, prepared),  # type: ignore[arg-type]  # given columns, not a list of rows
        pin_memory=pin_memory,
        # Starting a loader draws a number; from the global stream, that would shift every later dropout.
        generator=torch.Generator(),
    )
    return iter(loader)
