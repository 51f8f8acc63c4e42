"""Padding: every value where it was, and nothing but the given value after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runner.data.padding import padded
from torch.nn.utils.rnn import pad_sequence

ROWS = [np.array(row, dtype=np.int32) for row in ([5, 6, 7], [8], [], [9, -100])]


@pytest.mark.parametrize("value", [0, 1, -100])
def test_equals_torchs_own(value: int) -> None:
    """Without a length the tensor is that of torch's pad_sequence."""
    expected = pad_sequence([torch.from_numpy(row).long() for row in ROWS], batch_first=True, padding_value=value)
    found = padded(ROWS, value)
    assert torch.equal(found, expected)
    assert found.dtype is torch.int64


@pytest.mark.parametrize("length", [3, 4, 20])
def test_to_a_length(length: int) -> None:
    """A length, from the longest row's on, is how long every row becomes."""
    found = padded(ROWS, 1, length)
    assert found.shape == (4, length)
    for row, values in zip(ROWS, found.tolist(), strict=True):
        assert values == row.tolist() + [1] * (length - len(row))


@pytest.mark.parametrize("length", [0, 2])
def test_nothing_is_cut_off(length: int) -> None:
    """A row that is longer than the length ends the run instead of losing tokens."""
    with pytest.raises(AssertionError):
        padded(ROWS, 0, length)


def test_rows_are_copied() -> None:
    """Rows come out of memory-mapped files: what is done to a batch must not reach them."""
    rows = [np.array([1, 2], dtype=np.int32)]
    rows[0].flags.writeable = False
    found = padded(rows, 0)
    found.fill_(7)
    assert rows[0].tolist() == [1, 2]
    assert found.is_contiguous()


def test_large_ids_stay() -> None:
    """The largest id that a table holds arrives as it is."""
    assert padded([np.array([2**31 - 1], dtype=np.int32)], 0).tolist() == [[2**31 - 1]]
