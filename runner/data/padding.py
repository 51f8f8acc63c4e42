"""Rows of different lengths as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def padded(rows: Sequence[np.ndarray], value: int, length: int | None = None) -> Tensor:
    """Rows of whole numbers, filled up with `value`; int64 of shape [rows, length].

    `length`: at least the longest row's, which it is where it is None.
    """
    longest = max(len(row) for row in rows)
    length = longest if length is None else length
    assert length >= longest, (length, longest)
    together = np.full((len(rows), length), value, dtype=np.int64)
    for number, row in enumerate(rows):
        together[number, : len(row)] = row
    return torch.from_numpy(together)
