"""The schedule: a pure function of the share of samples seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from runner.config.choices import ScheduleName
from runner.config.schema import Schedule
from runner.plan import make_plan
from runner.plan.schedule import lr_multiplier
from tests.configured import configured

NAMES = tuple(ScheduleName)
LINEAR, COSINE, CONSTANT, WSD = ScheduleName.linear, ScheduleName.cosine, ScheduleName.constant, ScheduleName.wsd


@pytest.mark.parametrize(
    ("schedule", "share", "factor"),
    [
        # The warm-up is the same for all: a straight line from 0.
        *((Schedule(name, 0.2), 0.0, 0.0) for name in NAMES),
        *((Schedule(name, 0.2), 0.05, 0.25) for name in NAMES),
        *((Schedule(name, 0.2), 0.2, 1.0) for name in NAMES),
        *((Schedule(name), 0.0, 1.0) for name in NAMES),
        (Schedule(LINEAR, 0.2), 0.9, 0.125),
        (Schedule(LINEAR, 0.2), 1.0, 0.0),
        (Schedule(LINEAR, 0.2, min_lr_share=0.2), 0.9, 0.3),
        (Schedule(COSINE, 0.2), 0.4, 0.8535533905932737),  # (1 + cos 45°) / 2
        (Schedule(COSINE, 0.2), 1.0, 0.0),
        (Schedule(WSD, 0.2, decay_share=0.4), 0.6, 1.0),
        (Schedule(WSD, 0.2, decay_share=0.4), 0.9, 0.25),
        (Schedule(WSD, 0.2, decay_share=0.8), 0.9, 0.125),
        (Schedule(CONSTANT, 0.2), 1.0, 1.0),
        # Rounding can push the share above 1.
        *((Schedule(name, 0.1), 1.0 + 1e-9, 0.0) for name in NAMES if name is not CONSTANT),
    ],
)
def test_values_by_hand(schedule: Schedule, share: float, factor: float) -> None:
    assert lr_multiplier(schedule, share) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        (Schedule(LINEAR, 0.25), lambda o: get_linear_schedule_with_warmup(o, 10, 40)),
        (Schedule(COSINE, 0.25), lambda o: get_cosine_schedule_with_warmup(o, 10, 40)),
        (
            Schedule(COSINE, 0.25, min_lr_share=0.1),
            lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, 10, 40, min_lr_rate=0.1),
        ),
        (
            Schedule(ScheduleName.polynomial, 0.25, min_lr_share=0.1, power=3.0),
            lambda o: get_polynomial_decay_schedule_with_warmup(o, 10, 40, lr_end=0.03, power=3.0),
        ),
        (
            Schedule(WSD, 0.25, decay_share=0.2),
            lambda o: get_wsd_schedule(o, 10, 8, 40, decay_type="linear"),
        ),
        (Schedule(CONSTANT, 0.25), lambda o: get_constant_schedule_with_warmup(o, 10)),
    ],
)
def test_equals_transformers_at_whole_steps(schedule: Schedule, theirs: Callable[[Optimizer], LRScheduler]) -> None:
    """With 10 of 40 equal steps of warm-up, every step's learning rate equals transformers'."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = theirs(optimizer)
    for step in range(41):
        ours = 0.3 * lr_multiplier(schedule, step / 40)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer takes no step here
            scheduler.step()


@pytest.mark.parametrize("name", NAMES)
def test_same_learning_rate_at_the_same_sample(name: ScheduleName) -> None:
    """Runs with different global batches have the same multiplier after the same number of samples."""
    at_samples: dict[int, set[float]] = {}
    for global_batch in (20, 60, 120):
        settings = f"batch.global_batch={global_batch} epochs=2 schedule.warmup_share=0.15"
        plan = make_plan(configured(settings), 600, 2)
        for step in range(plan.optimizer_steps):
            seen = plan.samples_before(step)
            at_samples.setdefault(seen, set()).add(lr_multiplier(Schedule(name, 0.15), seen / plan.total_samples))
    shared = [factors for seen, factors in at_samples.items() if seen % 120 == 0]
    assert len(shared) == 10
    assert all(len(factors) == 1 for factors in shared)
    assert at_samples[120].pop() == pytest.approx(2 / 3)  # 120 of the 180 samples of warm-up
