"""The learning-rate schedule: a pure function of the share of samples seen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from runner.plan.plan import Plan

if TYPE_CHECKING:  # imports OmegaConf
    from runner.config.schema import Schedule

#: With more steps in an epoch, its last, small batch changes the sum of the learning rates by less than a tenth.
_FEW_STEPS = 10
_MATERIAL = 0.1


def lr_multiplier(name: str, share: float, warmup_share: float) -> float:
    """The factor on the peak learning rate when `share` (0 to 1) of all samples have been seen.

    It rises linearly from 0 over `warmup_share`, then is constant (`constant`), falls linearly to 0 (`linear`) or
    follows half a cosine to 0 (`cosine`; Loshchilov & Hutter 2017, "SGDR", without restarts). It depends only on the
    share, so every setup has the same learning rate at the same sample.
    """
    if share < warmup_share:
        return share / warmup_share
    if name == "constant":
        return 1.0
    rest = max(0.0, (1.0 - share) / (1.0 - warmup_share))
    if name == "linear":
        return rest
    assert name == "cosine", name
    return 0.5 * (1.0 + math.cos(math.pi * (1.0 - rest)))


def schedule_warning(plan: Plan, schedule: Schedule) -> str | None:
    """A sentence where the learning rates are not nearly those of a schedule by steps, which other trainers have.

    If epochs end with a small batch and have few steps, that step has the learning rate of nearly the same sample as
    the next one. None elsewhere.
    """
    steps, tail = plan.optimizer_steps, plan.samples_per_epoch % plan.global_batch
    if plan.drop_last or not tail or plan.steps_per_epoch > _FEW_STEPS:
        return None

    def total(shares: Iterable[float]) -> float:
        return sum(lr_multiplier(schedule.name.name, share, schedule.warmup_share) for share in shares)

    by_samples = total(plan.samples_before(step) / plan.total_samples for step in range(steps))
    by_steps = total(step / steps for step in range(steps))
    if by_steps == 0 or abs(by_samples / by_steps - 1) < _MATERIAL:
        return None
    return (
        f"the learning rates of all steps add up to {by_samples / by_steps:.2f} of those of a schedule by steps, which "
        f"other trainers have: here it follows the samples seen, and epochs end with a step of {tail} samples; a batch "
        f"that divides {plan.samples_per_epoch}, or batch.drop_last=true, makes both the same"
    )
