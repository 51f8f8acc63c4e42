"""The shapes of micro-batches: to which length rows are padded, and how many rows a batch has."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: On devices that compile for every shape: at most this many buckets, and none shorter than this many tokens.
_BUCKETS, _SHORTEST = 4, 16


@dataclass(frozen=True)
class Layout:
    """`lengths`: tokens that rows may be padded to, ascending; None: pad to the longest row of the batch.

    `rows`: rows of every batch, missing ones being fillers; None: as many as there are samples.
    """

    lengths: tuple[int, ...] | None
    rows: int | None

    def length(self, longest: int) -> int:
        """The length to pad a batch to whose longest row has `longest` tokens."""
        return longest if self.lengths is None else self.lengths[bisect.bisect_left(self.lengths, longest)]


def layout(lengths: np.ndarray, rows: int, buckets: Sequence[int] | None, compiles: bool) -> Layout:
    """The layout for a table whose rows have these lengths.

    `rows`: of the largest micro-batch. `buckets`: `device.length_buckets`. `compiles`: whether the device compiles a
    program for every shape; it gets a few buckets even if none are configured.
    """
    longest = int(lengths.max(initial=1))
    if buckets is None:
        return Layout(halvings(longest), rows) if compiles else Layout(None, None)
    # Never beyond the longest row: the model may have no positions for more.
    return Layout((*sorted({bucket for bucket in buckets if bucket < longest}), longest), rows if compiles else None)


def halvings(longest: int) -> tuple[int, ...]:
    """`longest`, its half, its quarter and so on: few shapes, and less than half of a long row is padding.

    The longest bucket is not rounded up, for the model may have no more positions.
    """
    sizes = {-(-longest // 2**i) for i in range(_BUCKETS)}
    return tuple(sorted(size for size in sizes if size == longest or size >= _SHORTEST))


def padded(rows: Sequence[np.ndarray], value: int, length: int | None = None) -> Tensor:
    """Rows of integers padded with `value` to `length`, by default that of the longest row; int64 [rows, length]."""
    longest = max(len(row) for row in rows)
    length = longest if length is None else length
    assert length >= longest, (length, longest)
    together = np.full((len(rows), length), value, dtype=np.int64)
    for number, row in enumerate(rows):
        together[number, : len(row)] = row
    return torch.from_numpy(together)
