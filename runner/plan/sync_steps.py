"""After which optimizer steps workers synchronise: pure arithmetic over the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runner.config.choices import SyncSchedule
from runner.config.schema import Schedule, Sync
from runner.errors import require
from runner.plan import Plan
from runner.plan.schedule import lr_multiplier


@dataclass(frozen=True)
class SyncSteps:
    """Optimizer steps, counted from 0.

    `first_local`: the first local step; those before it are fully synchronous. `due`: the steps from there on that are
    followed by a synchronisation: of all weights, or of the last of their fragments. Local steps after the last of them
    are synchronised at the end of the run.
    """

    first_local: int
    due: frozenset[int]


def sync_steps(plan: Plan, sync: Sync, schedule: Schedule) -> SyncSteps:
    """After which steps a run synchronises. Raises UserError if `post_local` leaves no local step."""
    if sync.always_synchronous or plan.world_size == 1:
        return SyncSteps(plan.optimizer_steps, frozenset())
    if sync.schedule is SyncSchedule.post_local:
        first = _first_local(plan, sync.synchronous_share_or_default)
        return SyncSteps(first, frozenset(range(first + sync.k - 1, plan.optimizer_steps, sync.k)))
    if sync.schedule is SyncSchedule.qsr:
        return SyncSteps(0, frozenset(_quadratic(plan, sync, schedule)))
    return SyncSteps(0, frozenset(range(sync.k - 1, plan.optimizer_steps, sync.k)))


def _first_local(plan: Plan, share: float) -> int:
    """The first step before which at least this share of the samples has been seen.

    Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD": synchronous first, local later.
    """
    first = plan.steps_for(share * plan.total_samples)
    rule = f"none of the run's {plan.optimizer_steps} optimizer steps would be local: use a smaller share"
    require(first < plan.optimizer_steps, "sync.synchronous_share", share, rule)
    return first


def _quadratic(plan: Plan, sync: Sync, schedule: Schedule) -> Iterator[int]:
    """The last steps of phases of max(k, ⌊(alpha / lr)²⌋) steps, with the lr of a phase's first step.

    During the warm-up the peak learning rate is used.
    Gu et al. 2024, "A Quadratic Synchronization Rule for Distributed Deep Learning".
    """
    # The default alpha, lr √k, is squared without taking the root, whose rounding could lose a step.
    alpha, factor = (plan.lr, sync.k) if sync.qsr_alpha is None else (sync.qsr_alpha, 1)
    lr = _lr_after_warmup(plan, schedule)
    step = 0
    while True:
        rate = lr(step)
        # At a learning rate of 0 the phase lasts to the end of the run.
        ratio = alpha / rate if rate > 0 else math.inf
        step += max(sync.k, int(min(ratio * ratio * factor * (1 + 1e-12), plan.optimizer_steps + 1)))
        if step > plan.optimizer_steps:
            return
        yield step - 1


def _lr_after_warmup(plan: Plan, schedule: Schedule) -> Callable[[int], float]:
    def lr(step: int) -> float:
        share = max(plan.samples_before(step) / plan.total_samples, schedule.warmup_share)
        return plan.lr * lr_multiplier(schedule, share)

    return lr
