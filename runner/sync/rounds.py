"""Rounds of local steps, in each of which every fragment of the weights is synchronised once."""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """The optimizer steps `first` to `last`, counted from 0, of which there are at least as many as fragments."""

    first: int
    last: int

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    def due(self, step: int, fragments: int) -> list[int]:
        """The numbers of the fragments that are synchronised after `step`; the last fragment ends the round."""
        return [n for n in range(fragments) if step == self.last - (fragments - 1 - n) * self.steps // fragments]


class PlannedRounds:
    """Rounds that end with the steps `due`."""

    def __init__(self, due: Collection[int]) -> None:
        self._last = sorted(due)

    def start(self, step: int) -> Round | None:
        """The round that begins with this step; None if no synchronisation is due any more."""
        number = bisect.bisect_left(self._last, step)
        return Round(step, self._last[number]) if number < len(self._last) else None
