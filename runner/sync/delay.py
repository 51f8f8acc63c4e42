"""How many optimizer steps after its start an average is applied: given, or the fewest for which no worker waits."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

#: The first average is not counted. The slowest of the next ones decides, of which there are at least four.
_NOT_MEASURED, _MEASURED = 1, 4
#: What changes during a run.
_STATE = ("steps", "is_open", "needed", "step_seconds")


@dataclass
class Delay:
    """`steps`: the delay. `is_open`: it will be replaced by a measured one, of at most `most` steps.

    `fragments`: all of them are measured before that.
    """

    steps: int
    is_open: bool = False
    most: int = 1
    fragments: int = 1
    #: Of each average so far, the optimizer steps that it took; and the seconds of steps, without synchronisation.
    needed: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    _left_at: float | None = None

    def enter(self) -> None:
        """Called at the end of an optimizer step, before synchronisation."""
        if self.is_open and self._left_at is not None:
            self.step_seconds.append(time.perf_counter() - self._left_at)

    def leave(self) -> None:
        """Called when synchronisation after a step is over."""
        self._left_at = time.perf_counter()

    def measured(self, seconds: float | None) -> None:
        """An average of this worker took so long."""
        if self.is_open and seconds is not None and self.step_seconds:
            self.needed.append(math.ceil(seconds / median(self.step_seconds)))

    @property
    def proposal(self) -> int:
        """The fewest steps for which this worker would not wait; 0 if it is not known yet."""
        measured = self.needed[_NOT_MEASURED:]
        return max(measured) if len(measured) >= max(_MEASURED, self.fragments) else 0

    def agree(self, proposals: list[float]) -> None:
        """`proposals`: of all workers, as they were sent with an average. The largest counts once all are known."""
        if self.is_open and min(proposals) > 0:
            self.steps = min(max(1, int(max(proposals))), self.most)
            self.is_open = False

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, copy.copy(state[name]))
