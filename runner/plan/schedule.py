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


def lr_multiplier(schedule: Schedule, share: float) -> float:
    """The factor on the peak learning rate when `share` (0 to 1) of all samples have been seen.

    It rises linearly from 0 over `warmup_share`. Then it is constant (`constant`), or falls to `min_lr_share`: linearly
    (`linear`), along half a cosine (`cosine`; Loshchilov & Hutter 2017, "SGDR", without restarts), as a `power` of what
    is left (`polynomial`), or linearly over the last `decay_share` (`wsd`: warm-up, stable, decay; Hu et al. 2024,
    "MiniCPM", and Hägele et al. 2024). It depends only on the share, so every setup has the same learning rate at the
    same sample.
    """
    name, warmup_share = schedule.name.name, schedule.warmup_share
    if share < warmup_share:
        return share / warmup_share
    if name == "constant":
        return 1.0
    falling = schedule.decay_share if name == "wsd" else 1.0 - warmup_share
    rest = min(1.0, max(0.0, (1.0 - share) / falling))
    if name == "cosine":
        rest = 0.5 * (1.0 + math.cos(math.pi * (1.0 - rest)))
    elif name == "polynomial":
        rest **= schedule.power
    return schedule.min_lr_share + (1.0 - schedule.min_lr_share) * rest


def falling_words(schedule: Schedule) -> list[str]:
    """What the schedule sets besides its warm-up: `["decay over the last 10%", "to 1% of the peak"]`."""
    words = [f"decay over the last {100 * schedule.decay_share:.4g}%"] * (schedule.name.name == "wsd")
    words += [f"power {schedule.power:g}"] * (schedule.name.name == "polynomial")
    return words + [f"to {100 * schedule.min_lr_share:.4g}% of the peak"] * (schedule.min_lr_share > 0)


def schedule_warning(plan: Plan, schedule: Schedule) -> str | None:
    """A sentence where the learning rates are not nearly those of a schedule by steps, which other trainers have.

    If epochs end with a small batch and have few steps, that step has the learning rate of nearly the same sample as
    the next one. None elsewhere.
    """
    steps, tail = plan.optimizer_steps, plan.samples_per_epoch % plan.global_batch
    if plan.drop_last or not tail or plan.steps_per_epoch > _FEW_STEPS:
        return None

    def total(shares: Iterable[float]) -> float:
        return sum(lr_multiplier(schedule, share) for share in shares)

    by_samples = total(plan.samples_before(step) / plan.total_samples for step in range(steps))
    by_steps = total(step / steps for step in range(steps))
    if by_steps == 0 or abs(by_samples / by_steps - 1) < _MATERIAL:
        return None
    return (
        f"the learning rates of all steps add up to {by_samples / by_steps:.2f} of those of a schedule by steps, which "
        f"other trainers have: here it follows the samples seen, and epochs end with a step of {tail} samples; a batch "
        f"that divides {plan.samples_per_epoch}, or batch.drop_last=true, makes both the same"
    )
