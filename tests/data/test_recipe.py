"""Rows without targets, and prepared data."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from runner.data.recipe import IGNORED_LABEL, Prepared, label_counts, without_targets
from runner.data.table import write_table


@pytest.mark.parametrize("rows", [[True, True, True], [False, True, True], [True, False, False]])
@pytest.mark.parametrize(
    "labels",
    [torch.tensor([1, 0, 2]), torch.tensor([[3, -100, 2], [1, 1, -100], [0, 0, 7]]), torch.tensor([1.5, -100.0, 0.0])],
)
def test_rows_lose_their_targets(labels: torch.Tensor, rows: list[bool]) -> None:
    """The rows named lose every target, of tokens too, the others keep theirs; inputs and the given batch stay."""
    batch = {"input_ids": torch.tensor([[5, 6], [7, 8], [9, 9]]), "labels": labels}
    before = labels.clone()
    without = without_targets(batch, np.array(rows))
    assert without["labels"].dtype == labels.dtype
    ignored = math.nan if labels.is_floating_point() else IGNORED_LABEL  # every number may be a target
    for row, expected in enumerate(before):
        found = torch.full_like(expected, ignored) if rows[row] else expected
        assert torch.allclose(without["labels"][row], found, rtol=0, atol=0, equal_nan=True)
    assert IGNORED_LABEL == -100  # what torch's cross_entropy leaves out by default
    assert without["input_ids"] is batch["input_ids"]
    assert torch.equal(batch["labels"], before)


def test_a_batch_without_fillers_is_not_copied() -> None:
    """Where no row is named the batch is handed on as it is."""
    batch = {"labels": torch.tensor([1, 0])}
    assert without_targets(batch, np.zeros(2, dtype=bool)) is batch


def test_prepared_data_are_mapped(tmp_path: Path) -> None:
    """A cache entry is loaded with both tables, each its own, its properties and its folder."""
    for part, lengths in (("train", [3, 4, 5]), ("eval", [1])):
        write_table(tmp_path / part, {"length": lengths, "label_count": [2] * len(lengths)})
    (tmp_path / "properties.json").write_text('{"classes": 2}')
    prepared = Prepared.load(tmp_path)
    assert prepared.train.column("length").tolist() == [3, 4, 5]
    assert prepared.eval.column("length").tolist() == [1]
    assert prepared.properties == {"classes": 2}
    assert prepared.folder == tmp_path
    counts = label_counts(prepared.train)
    assert counts.tolist() == [2, 2, 2]
    assert counts.dtype == np.int64
