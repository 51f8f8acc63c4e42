"""The settings of the group `sync`, and what they cannot be, each in one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import MISSING

from runner.config.choices import Average, Compress, SyncPolicyName, SyncSchedule
from runner.errors import require

_OUTER = ("outer_lr", "outer_momentum", "outer_nesterov", "outer_per_lr")


@dataclass(frozen=True)
class Sync:
    """When and how replicas are brought together. `k`: optimizer steps between two synchronisations, at the least.

    `average`: whether the optimizer's moments are averaged like the weights. `schedule`: of the local phases' length;
    `synchronous_share`: share of the samples that `post_local` trains on fully synchronously; `qsr_alpha`: the learning
    rate, times the root of a length, below which `qsr` makes phases longer than `k`. `compress`: the numbers' form on
    the way. `overlap`: an average travels while the next `delay` optimizer steps run. `outer_*`: the outer SGD, whose
    pseudo-gradient `outer_per_lr` divides by the learning rate.
    """

    policy: SyncPolicyName = MISSING
    k: int = MISSING
    average: Average = Average.weights
    schedule: SyncSchedule = SyncSchedule.constant
    synchronous_share: float | None = None
    qsr_alpha: float | None = None
    compress: Compress = Compress.none
    overlap: bool = False
    delay: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer_nesterov: bool | None = None
    outer_per_lr: bool | None = None

    @property
    def averages_gradients_always(self) -> bool:
        """Whether this is fully synchronous training from the first step to the last."""
        # Under `qsr` phases outgrow k, and one of a single step is as any other: a step alone, and an average.
        always = self.k == 1 and self.schedule is not SyncSchedule.qsr
        return always and self.policy in (SyncPolicyName.periodic, SyncPolicyName.gradients)

    @property
    def share_trained_synchronously(self) -> float:
        """Of the samples, under `post_local`."""
        return 0.5 if self.synchronous_share is None else self.synchronous_share

    @property
    def steps_travelled(self) -> int:
        """Optimizer steps that run while an average travels; 0: none, everybody waits for it."""
        if not self.overlap:
            return 0
        return self.delay if self.delay is not None else -(-self.k // 2)

    def __post_init__(self) -> None:
        _check(self)


def _check(sync: Sync) -> None:
    """Refuse what is out of range, and what does not go together. Raises UserError."""
    require(sync.k >= 1, "sync.k", sync.k, "it must be at least 1 optimizer step (1 = fully synchronous)")
    _check_schedule(sync)
    _check_overlap(sync)
    _check_outer(sync)
    _check_average(sync)


def _check_schedule(sync: Sync) -> None:
    schedule, share, alpha = sync.schedule, sync.synchronous_share, sync.qsr_alpha
    if sync.averages_gradients_always:
        rule = "with sync.k=1 every step is synchronous and no phase is local: set sync.k above 1"
        require(schedule is SyncSchedule.constant, "sync.schedule", schedule, rule)
    if schedule is SyncSchedule.post_local:
        rule = "it is a share of the samples, above 0 and below 1 (null: 0.5)"
        require(share is None or 0 < share < 1, "sync.synchronous_share", share, rule)
    else:
        require(share is None, "sync.synchronous_share", share, "only sync.schedule=post_local has such a share")
    if schedule is SyncSchedule.qsr:
        rule = "it is a learning rate times the root of a number of steps, above 0 and finite (null: peak rate × √k)"
        require(alpha is None or 0 < alpha < math.inf, "sync.qsr_alpha", alpha, rule)
    else:
        require(alpha is None, "sync.qsr_alpha", alpha, "only sync.schedule=qsr has such a number")


def _check_overlap(sync: Sync) -> None:
    if not sync.overlap:
        require(sync.delay is None, "sync.delay", sync.delay, "only with sync.overlap=true does an average take steps")
        return
    rule = "sync.policy=gradients averages gradients, which a later step has no use for: leave sync.overlap=false"
    require(sync.policy is not SyncPolicyName.gradients, "sync.overlap", True, rule)
    rule = "with sync.k=1 there is no step that could run meanwhile: set sync.k above 1, or sync.overlap=false"
    require(sync.k > 1, "sync.overlap", True, rule)
    rule = f"an average must arrive before the next one leaves: 1 to sync.k={sync.k} optimizer steps (null: half of k)"
    require(sync.delay is None or 1 <= sync.delay <= sync.k, "sync.delay", sync.delay, rule)


def _check_outer(sync: Sync) -> None:
    if sync.policy is not SyncPolicyName.outer:
        for name in _OUTER:
            value = getattr(sync, name)
            require(value is None, f"sync.{name}", value, f"sync.policy={sync.policy.name} has no outer optimizer")
        return
    for name in _OUTER:
        require(getattr(sync, name) is not None, f"sync.{name}", None, "sync.policy=outer needs it: choose sync=outer")
    lr, momentum = sync.outer_lr, sync.outer_momentum
    assert lr is not None
    assert momentum is not None
    require(0 < lr < math.inf, "sync.outer_lr", lr, "it must be above 0, and finite")
    require(0 <= momentum < 1, "sync.outer_momentum", momentum, "it must be at least 0 and below 1")
    require(not sync.outer_nesterov or momentum > 0, "sync.outer_nesterov", True, "it needs a momentum above 0")


def _check_average(sync: Sync) -> None:
    if sync.average is Average.weights:
        return
    value = sync.average
    rule = f"sync.policy={sync.policy.name} leaves moments to each worker: use sync.policy=periodic for it"
    require(sync.policy is SyncPolicyName.periodic, "sync.average", value, rule)
    rule = "with sync.k=1 moments are common anyway: leave sync.average=weights"
    require(not sync.averages_gradients_always, "sync.average", value, rule)
    rule = "moments have moved on when their average arrives: leave sync.overlap=false, or sync.average=weights"
    require(not sync.overlap, "sync.average", value, rule)
    rule = "second moments are too small for fp16: use sync.compress=bf16 or none"
    require(sync.compress is not Compress.fp16, "sync.average", value, rule)
