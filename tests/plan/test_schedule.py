"""The schedule: a pure function of the share of samples seen."""

from __future__ import annotations

import itertools
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

NAMES = ("linear", "cosine", "constant")


@pytest.mark.parametrize(
    ("name", "share", "warmup_share", "factor"),
    [
        # Warm-up is the same for all: from 0, a straight line.
        *((name, 0.0, 0.2, 0.0) for name in NAMES),
        *((name, 0.05, 0.2, 0.25) for name in NAMES),
        *((name, 0.1, 0.2, 0.5) for name in NAMES),
        *((name, 0.2, 0.2, 1.0) for name in NAMES),
        # Without warm-up the peak comes first.
        *((name, 0.0, 0.0, 1.0) for name in NAMES),
        ("linear", 0.25, 0.0, 0.75),
        ("linear", 0.6, 0.2, 0.5),
        ("linear", 0.9, 0.2, 0.125),
        ("linear", 1.0, 0.2, 0.0),
        ("cosine", 0.4, 0.2, 0.8535533905932737),  # (1 + cos 45°) / 2
        ("cosine", 0.6, 0.2, 0.5),
        ("cosine", 0.8, 0.2, 0.14644660940672627),  # (1 + cos 135°) / 2
        ("cosine", 0.5, 0.0, 0.5),
        ("cosine", 1.0, 0.2, 0.0),
        ("constant", 0.6, 0.2, 1.0),
        ("constant", 1.0, 0.2, 1.0),
    ],
)
def test_values_by_hand(name: str, share: float, warmup_share: float, factor: float) -> None:
    """The multiplier at corners and between them is the one worked out on paper."""
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
    """With 10 of 40 equal steps of warm-up, every step's learning rate is the one that transformers has."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = theirs(optimizer)
    for step in range(41):
        ours = 0.3 * lr_multiplier(name, step / 40, 0.25)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer takes no step here
            scheduler.step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup_share", [0.0, 0.06, 0.5, 0.99])
def test_rises_to_the_peak_and_never_rises_again(name: str, warmup_share: float) -> None:
    """The multiplier stays within 0 and 1, rises strictly during warm-up, and never rises afterwards."""
    shares = [i / 1000 for i in range(1001)]
    factors = [lr_multiplier(name, share, warmup_share) for share in shares]
    assert 0.0 <= min(factors) <= max(factors) <= 1.0
    rising = [f for s, f in zip(shares, factors, strict=True) if s < warmup_share]
    after = [f for s, f in zip(shares, factors, strict=True) if s >= warmup_share]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert name == "constant" or all(a > b for a, b in itertools.pairwise(after))


@pytest.mark.parametrize("name", NAMES)
def test_no_jump_where_the_warm_up_ends(name: str) -> None:
    """The end of the warm-up and the beginning of what follows meet at the peak."""
    below, at = (lr_multiplier(name, share, 0.3) for share in (0.3 - 1e-9, 0.3))
    assert below == pytest.approx(1.0, abs=1e-7)
    assert at == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_never_negative_past_the_end(name: str) -> None:
    """A share that rounding has pushed above 1 does not turn the learning rate negative."""
    assert lr_multiplier(name, 1.0 + 1e-9, 0.1) == pytest.approx(0.0, abs=1e-12)
    assert lr_multiplier(name, 1.5, 0.1) >= 0.0


@pytest.mark.parametrize("name", NAMES)
def test_same_learning_rate_at_the_same_sample(name: str) -> None:
    """Runs with different global batches have the same multiplier whenever they have seen as many samples."""
    at_samples: dict[int, set[float]] = {}
    for global_batch in (20, 60, 120):
        plan = make_plan(
            samples_per_epoch=600,
            world_size=2,
            global_batch=global_batch,
            micro_batch=None,
            accumulation_steps=1,
            max_micro_batch=None,
            drop_last=False,
            k=1,
            base_lr=1.0,
            scaling_rule="none",
            scaling_batch="global_batch",
            reference_batch=48,
            epochs=2,
            max_steps=None,
            warmup_share=0.15,
        )
        for step in range(plan.optimizer_steps):
            seen = plan.samples_before(step)
            at_samples.setdefault(seen, set()).add(lr_multiplier(name, seen / plan.total_samples, 0.15))
    shared = [factors for seen, factors in at_samples.items() if seen % 120 == 0]
    assert len(shared) == 10
    assert all(len(factors) == 1 for factors in shared)
    assert at_samples[120].pop() == pytest.approx(2 / 3)  # 120 of the 180 samples of warm-up
