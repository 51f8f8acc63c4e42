"""Find the schedulers of an optimizer, which keeps no reference to them."""

from __future__ import annotations

import gc
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR, PolynomialLR

from runner.tools.audit.records import ScheduleFacts


class Schedulers:
    """Counts how often the schedulers of an optimizer were stepped."""

    def __init__(self, optimizer: Optimizer) -> None:
        objects = gc.get_objects()  # types only: isinstance runs code of proxies
        wrapped = [one.scheduler for one in objects if type(one).__name__ == "AcceleratedScheduler"]
        found = (one for one in objects if issubclass(type(one), LRScheduler))
        self._found: list[tuple[Any, bool]] = [
            (one, any(one is other for other in wrapped))
            for one in found
            if _torch(getattr(one, "optimizer", None)) is optimizer and hasattr(one, "last_epoch")
        ]

    def stepped(self) -> int:
        """Number of times that the outermost was stepped; 0 without any."""
        return max((int(one.last_epoch) for one, _ in self._found), default=0)

    def facts(self) -> tuple[ScheduleFacts, ...]:
        return tuple(ScheduleFacts(int(one.last_epoch), _length(one), multiplied) for one, multiplied in self._found)


def _torch(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)  # Accelerate's wraps it


def _length(scheduler: Any) -> int | None:
    """The steps after which a falling learning rate has reached its end; None if the scheduler does not say."""
    length: Any = None
    if isinstance(scheduler, LambdaLR):  # transformers' schedules are partial functions
        length = getattr(scheduler.lr_lambdas[0], "keywords", {}).get("num_training_steps")
    elif isinstance(scheduler, CosineAnnealingLR):
        length = scheduler.T_max
    elif isinstance(scheduler, OneCycleLR):
        length = scheduler.total_steps
    elif isinstance(scheduler, PolynomialLR) or (
        isinstance(scheduler, LinearLR) and scheduler.end_factor < scheduler.start_factor
    ):
        length = scheduler.total_iters
    return None if length is None else int(length)
