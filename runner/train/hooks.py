"""Hooks around the training of a worker, and their view of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runner.folder.evaluation_rows import KeptRows
from runner.plan.order import DataOrder
from runner.train.replica import Replica
from runner.train.throughput import Meter

#: Called on rank 0 with (optimizer step, metrics).
LogMetrics = Callable[[int, dict[str, float]], None]


class Paused(Exception):
    """Raised by a hook that ends training before the end of the plan, once the state is saved."""


class Training(Protocol):
    """The part of the loop that hooks see, which describes it."""

    replica: Replica
    order: DataOrder
    meter: Meter
    optimizer_step: int

    @property
    def synchronised(self) -> bool: ...
    @property
    def evaluation_stopped(self) -> bool: ...
    @property
    def log(self) -> LogMetrics: ...
    def flush(self, wait: bool = True) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...


class Hook(Protocol):
    """Does something after optimizer steps."""

    def after_step(self, training: Training) -> None:
        """Called on all workers after each optimizer step, so that it may be a collective."""


@dataclass(frozen=True)
class Hooks:
    """Where a worker reports to, and what else is done while it trains; by default nothing.

    `log`: used on rank 0. `evaluation_progress`: called with the progress of an evaluation in micro-batches, (done,
    total). `kept_rows`: gets the metrics by row of the weights that would be saved, on rank 0. `asked_to_end`: whether
    this worker was asked to save and end, which stops evaluations. `after_step`: called in this order, once a step was
    logged and evaluated, and its epoch closed.
    """

    log: LogMetrics | None = None
    evaluation_progress: Callable[[int, int], None] | None = None
    kept_rows: KeptRows | None = None
    asked_to_end: Callable[[], bool] = lambda: False
    after_step: Sequence[Hook] = ()
