"""Which shapes micro-batches come in."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Halves of the longest row that become buckets of their own, at most, and the shortest bucket that is worth a program.
_BUCKETS, _SHORTEST = 4, 16


@dataclass(frozen=True)
class Layout:
    """`lengths`: tokens that rows may be padded to, rising; None: to the longest row of the batch.

    `rows`: rows of every batch, missing ones being fillers; None: as many as there are samples.
    """

    lengths: tuple[int, ...] | None
    rows: int | None

    def length(self, longest: int) -> int:
        """What to pad a batch to whose longest row has so many tokens."""
        return longest if self.lengths is None else self.lengths[bisect.bisect_left(self.lengths, longest)]


def layout(lengths: np.ndarray, rows: int, buckets: Sequence[int] | None, compiles: bool) -> Layout:
    """The layout for a table whose rows have these lengths.

    `rows`: of the largest micro-batch. `buckets`: `device.length_buckets`. `compiles`: whether the device compiles a
    program for every shape, so that few are wanted even if no buckets are given.
    """
    longest = int(lengths.max(initial=1))
    if buckets is None:
        return Layout(halvings(longest), rows) if compiles else Layout(None, None)
    # Never beyond the longest row, for which alone the model is known to have positions.
    return Layout((*sorted({bucket for bucket in buckets if bucket < longest}), longest), rows if compiles else None)


def halvings(longest: int) -> tuple[int, ...]:
    """The longest row's length, half of it, and so on: few shapes, and for long rows less than half of it padding.

    The longest bucket is not rounded up to a rounder number, for which the model may have no positions.
    """
    sizes = {-(-longest // 2**i) for i in range(_BUCKETS)}
    return tuple(sorted(size for size in sizes if size == longest or size >= _SHORTEST))
