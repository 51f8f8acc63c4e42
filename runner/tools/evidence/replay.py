"""What the workers of a replay do: train the first steps again."""

from __future__ import annotations

from typing import Any

from runner.launch.local import WorkerContext
from runner.launch.worker import connect_launched
from runner.train.build import build_loop
from runner.train.hooks import Hooks
from runner.train.job import Job


def run_launched(job: dict[str, Any], context: WorkerContext) -> list[float]:
    """The entry point of a launched worker; on rank 0 the loss of each step. `job`: `Job.as_json()` and `steps`."""
    typed = Job.from_json(job["job"])
    backend = connect_launched(typed, context)
    losses: dict[int, float] = {}

    def log(step: int, metrics: dict[str, float]) -> None:
        if "train/loss" in metrics:
            losses[step] = metrics["train/loss"]

    loop = build_loop(typed, backend, Hooks(log=log))
    loop.train(until=job["steps"])
    loop.flush()
    loop.policy.close()
    backend.close()
    return [losses[step] for step in sorted(losses)]
