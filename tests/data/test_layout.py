"""The shapes of micro-batches: padding lengths, numbers of rows, and padding itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from runner.data.layout import Layout, halvings, layout, padded

#: Lengths of the rows of a table.
LENGTHS = np.array([5, 3, 14, 8, 9])


def test_without_buckets() -> None:
    """Batches are padded to their longest row; devices that compile get fractions of the data's longest row."""
    assert layout(LENGTHS, 6, None, compiles=False) == Layout(None, None)
    assert Layout(None, None).length(5) == 5
    assert layout(np.array([1, 100]), 6, None, compiles=True) == Layout((25, 50, 100), 6)
    assert layout(np.zeros(0, dtype=np.int64), 6, None, compiles=True).length(0) == 1


@pytest.mark.parametrize(
    ("buckets", "lengths"),
    [([8, 14], (8, 14)), ([16], (14,)), ([8, 15, 32], (8, 14)), ([4, 13], (4, 13, 14)), ([13, 8, 13], (8, 13, 14))],
)
@pytest.mark.parametrize("compiles", [False, True])
def test_given_buckets(buckets: list[int], lengths: tuple[int, ...], compiles: bool) -> None:
    """Sorted, and never beyond the longest row, for which alone the model is known to have positions."""
    found = layout(LENGTHS, 6, buckets, compiles)
    assert found == Layout(lengths, 6 if compiles else None)
    for tokens in range(1, 15):
        assert found.length(tokens) == min(length for length in lengths if length >= tokens)


def test_halvings() -> None:
    """Distinct, ascending up to the longest row, four at most, 16 tokens at least, none above twice the one before."""
    assert [halvings(longest) for longest in (512, 33, 31, 30, 1)] == [
        (64, 128, 256, 512),
        (17, 33),
        (16, 31),
        (30,),
        (1,),
    ]
    for longest in range(1, 2000):
        sizes = halvings(longest)
        assert sizes[-1] == longest
        assert len(sizes) <= 4
        assert all(size >= 16 for size in sizes[:-1])
        assert all(shorter < longer <= 2 * shorter for shorter, longer in itertools.pairwise(sizes))


def test_padded() -> None:
    """torch's own result, or longer; read-only rows of memory-mapped files are copied, and nothing is cut."""
    rows = [np.array(row, dtype=np.int32) for row in ([5, 6, 2**31 - 1], [8], [], [9, -100])]
    for row in rows:
        row.flags.writeable = False
    expected = pad_sequence([torch.tensor(row.tolist()) for row in rows], batch_first=True, padding_value=-100).long()
    assert torch.equal(padded(rows, -100), expected)
    longer = padded(rows, 1, 5)
    assert longer.tolist() == [row.tolist() + [1] * (5 - len(row)) for row in rows]
    longer.fill_(7)
    assert rows[1].tolist() == [8]
    with pytest.raises(AssertionError):
        padded(rows, 0, 2)
