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
    get_linear_schedule_with_warmup,
)

from runner.plan import make_plan
from runner.plan.schedule import lr_multiplier
from tests.configured import configured

NAMES = ("linear", "cosine", "constant")


@pytest.mark.parametrize(
    ("name", "share", "warmup_share", "factor"),
    [
        # The warm-up is the same for all: a straight line from 0.
        *((name, 0.0, 0.2, 0.0) for name in NAMES),
        *((name, 0.05, 0.2, 0.25) for name in NAMES),
        *((name, 0.2, 0.2, 1.0) for name in NAMES),
        *((name, 0.0, 0.0, 1.0) for name in NAMES),
        ("linear", 0.9, 0.2, 0.125),
        ("linear", 1.0, 0.2, 0.0),
        ("cosine", 0.4, 0.2, 0.8535533905932737),  # (1 + cos 45°) / 2
        ("cosine", 1.0, 0.2, 0.0),
        ("constant", 1.0, 0.2, 1.0),
        # Rounding can push the share above 1.
        ("linear", 1.5, 0.1, 0.0),
        ("cosine", 1.0 + 1e-9, 0.1, 0.0),
    ],
)
def test_values_by_hand(name: str, share: float, warmup_share: float, factor: float) -> None:
    assert lr_multiplier(name, share, warmup_share) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("linear", lambda o: get_linear_schedule_with_warmup(o, 10, 40)),
        ("cosine", lambda o: get_cosine_schedule_with_warmup(o, 10, 40)),
        ("constant", lambda o: get_constant_schedule_with_warmup(o, 10)),
    ],
)
def test_equals_transformers_at_whole_steps(name: str, theirs: Callable[[Optimizer], LRScheduler]) -> None:
    """With 10 of 40 equal steps of warm-up, every step's learning rate equals transformers'."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = theirs(optimizer)
    for step in range(41):
        ours = 0.3 * lr_multiplier(name, step / 40, 0.25)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer takes no step here
            scheduler.step()


@pytest.mark.parametrize("name", NAMES)
def test_same_learning_rate_at_the_same_sample(name: str) -> None:
    """Runs with different global batches have the same multiplier after the same number of samples."""
    at_samples: dict[int, set[float]] = {}
    for global_batch in (20, 60, 120):
        settings = f"batch.global_batch={global_batch} epochs=2 schedule.warmup_share=0.15"
        plan = make_plan(configured(settings), 600, 2)
        for step in range(plan.optimizer_steps):
            seen = plan.samples_before(step)
            at_samples.setdefault(seen, set()).add(lr_multiplier(name, seen / plan.total_samples, 0.15))
    shared = [factors for seen, factors in at_samples.items() if seen % 120 == 0]
    assert len(shared) == 10
    assert all(len(factors) == 1 for factors in shared)
    assert at_samples[120].pop() == pytest.approx(2 / 3)  # 120 of the 180 samples of warm-up
