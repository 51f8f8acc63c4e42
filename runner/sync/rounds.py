"""Rounds of local steps, in each of which every fragment of the weights is synchronised once."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol


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


class Rounds(Protocol):
    """Decides how long rounds are. All workers make the same decision."""

    #: Whether it depends on what is observed during the run.
    adapt: bool

    def start(self, step: int) -> Round | None:
        """The round that begins with this step; None if no synchronisation is due any more."""
        ...

    def observe(self, drift_per_step: float) -> None:
        """Called after each synchronisation, with the same number on all workers."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PlannedRounds:
    """Rounds that end with the steps `due`."""

    adapt = False

    def __init__(self, due: Collection[int]) -> None:
        self._last = sorted(due)

    def start(self, step: int) -> Round | None:
        number = bisect.bisect_left(self._last, step)
        return Round(step, self._last[number]) if number < len(self._last) else None

    def observe(self, drift_per_step: float) -> None:
        return

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class AdaptiveRounds:
    """Rounds as long as keeps the drift of replicas near `target`: at least `k` steps, and at most twice the last.

    Within a round drift is taken to grow with the number of steps. Fragments count alike, by their mean square.
    """

    adapt = True

    def __init__(self, k: int, target: float) -> None:
        self._k, self._target = k, target
        self._steps = k
        self._squares: list[float] = []

    def start(self, step: int) -> Round | None:
        if self._squares:
            drift_per_step = math.sqrt(sum(self._squares) / len(self._squares))
            self._steps = int(max(self._k, min(self._target / drift_per_step, 2 * self._steps)))
            self._squares = []
        return Round(step, step + self._steps - 1)

    def observe(self, drift_per_step: float) -> None:
        if drift_per_step > 0:  # 0: there was no synchronisation yet
            self._squares.append(drift_per_step**2)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._squares = state["steps"], list(state["squares"])
