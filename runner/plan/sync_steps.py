"""After which optimizer steps replicas are brought together: pure arithmetic over the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runner.config.choices import SyncSchedule
from runner.config.schema import Schedule, Sync
from runner.errors import UserError
from runner.plan import Plan
from runner.plan.schedule import lr_multiplier


@dataclass(frozen=True)
class SyncSteps:
    """Optimizer steps are counted from 0.

    `first_local`: the first step that a worker takes alone; those before it are fully synchronous. `due`: the steps
    from there on that are followed by a synchronisation. What is left after the last of them is brought together at the
    end of the run.
    """

    first_local: int
    due: frozenset[int]


def sync_steps(plan: Plan, sync: Sync, schedule: Schedule) -> SyncSteps:
    """Where the local phases of a run end. Raises UserError where `post_local` leaves none."""
    if sync.averages_gradients_always or plan.world_size == 1:
        return SyncSteps(plan.optimizer_steps, frozenset())
    if sync.schedule is SyncSchedule.post_local:
        first = _first_local(plan, sync.share_trained_synchronously)
        return SyncSteps(first, frozenset(range(first + sync.k - 1, plan.optimizer_steps, sync.k)))
    if sync.schedule is SyncSchedule.qsr:
        return SyncSteps(0, frozenset(_quadratic(plan, sync, schedule)))
    return SyncSteps(0, frozenset(range(sync.k - 1, plan.optimizer_steps, sync.k)))


def _first_local(plan: Plan, share: float) -> int:
    """The first step before which at least this share of the samples has been seen.

    Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD": synchronous first, local later.
    """
    first = plan.steps_for(share * plan.total_samples)
    if first >= plan.optimizer_steps:
        raise UserError(
            f"sync.synchronous_share={share} leaves none of the run's {plan.optimizer_steps} optimizer steps to "
            "sync.schedule=post_local: set a smaller share"
        )
    return first


def _quadratic(plan: Plan, sync: Sync, schedule: Schedule) -> Iterator[int]:
    """A phase of max(k, ⌊(alpha / lr)²⌋) steps, `lr` being that of its first step, and the peak's in the warm-up.

    Gu et al. 2024, "A Quadratic Synchronization Rule for Distributed Deep Learning".
    """
    # The default, lr √k, without its root, which would make a whole number of steps a little less than it is.
    alpha, factor = (plan.lr, sync.k) if sync.qsr_alpha is None else (sync.qsr_alpha, 1)
    lr = _lr_after_warmup(plan, schedule)
    step = 0
    while True:
        rate = lr(step)
        # Where the learning rate has come to nothing the rule asks for a phase without end.
        ratio = alpha / rate if rate > 0 else math.inf
        step += max(sync.k, int(min(ratio * ratio * factor * (1 + 1e-12), plan.optimizer_steps + 1)))
        if step > plan.optimizer_steps:
            return
        yield step - 1


def _lr_after_warmup(plan: Plan, schedule: Schedule) -> Callable[[int], float]:
    def lr(step: int) -> float:
        share = max(plan.samples_before(step) / plan.total_samples, schedule.warmup_share)
        return plan.lr * lr_multiplier(schedule.name.name, share, schedule.warmup_share)

    return lr
