"""What happened since workers were last brought together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from runner.sync.protocol import StepFacts


@dataclass
class Window:
    """The steps of one local phase so far. `count`: of this worker's loss terms, `global_count`: of all workers'."""

    steps: int = 0
    last: int = -1
    count: int = 0
    global_count: int = 0
    lr_sum: float = 0.0

    def add(self, facts: StepFacts) -> None:
        self.steps += 1
        self.last = facts.step
        self.count += facts.local_count
        self.global_count += facts.global_count
        self.lr_sum += facts.lr

    def weight(self, world_size: int) -> float:
        """This worker's part of an average: every worker knows the whole count from the data order."""
        return self.count / self.global_count if self.global_count else 1 / world_size

    @property
    def mean_lr(self) -> float:
        return self.lr_sum / self.steps

    def as_plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
