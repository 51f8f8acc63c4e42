"""The job that the parent sends to a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config.plain import from_plain, to_plain
from runner.config.schema import Config
from runner.data.recipe import DataFacts
from runner.plan import Plan


@dataclass(frozen=True)
class WorkerJob:
    """The job of a worker of any command.

    `folder`: for the files that workers write. `local_workers`: on each machine. `threads`: for each worker's
    computations on a CPU.
    """

    config: Config
    facts: DataFacts
    folder: Path
    device_type: str
    local_workers: int
    threads: int

    def as_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain


@dataclass(frozen=True)
class Job(WorkerJob):
    """A training job, in the folder of its run.

    `started_at`: of the command, or of workers that were started again, in seconds since the epoch. `checkpoint`: the
    folder of the one to continue from. `experiment`: what checkpoints say about it, as JSON-like data. `pause_after`:
    the optimizer step after which a race pauses the run, or the first later one with the same weights on all workers.
    """

    plan: Plan
    started_at: float
    checkpoint: Path | None = None
    experiment: Mapping[str, Any] = field(default_factory=dict)
    pause_after: int | None = None

    def pauses_after(self, step: int) -> bool:
        """True if a run that has done this optimizer step pauses as soon as all workers have the same weights."""
        return self.pause_after is not None and self.pause_after <= step < self.plan.optimizer_steps

    @staticmethod
    def from_json(data: dict[str, Any]) -> Job:
        return from_plain(Job, data)
