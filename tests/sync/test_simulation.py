"""The simulation of n replicas itself: identities that it must fulfil."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.sync.reference import ADAMW, SGD, Reference, largest_difference, simulate_synchronous
from tests.sync.simulation import Simulation, Sync, simulate, weighted_sum
from tests.token_recipe import TOKENS

#: Averaging weights equals averaging gradients only without clipping, and without momentum if weights are uneven.
PLAIN = [*SGD, "optimizer.momentum=0.0", "optimizer.clip_norm=null"]
#: With momentum: without a tail every worker has the same weight in every step.
EVEN = [*SGD, "optimizer.clip_norm=null", "batch.global_batch=20"]

#: Periodic averaging after every step without DDP: with a tiny alpha all phases have k = 1 steps.
EVERY_STEP = Sync(k=1, schedule="qsr", qsr_alpha=1e-9)


def apart(simulation: Simulation, other: Simulation) -> float:
    return largest_difference(simulation.commons[10], other.commons[10])


@pytest.mark.parametrize(
    ("overrides", "sync", "workers"),
    [
        (EVEN, EVERY_STEP, 2),
        ([*PLAIN, *TOKENS], Sync("accumulated", k=1), 3),
        ([*SGD, *TOKENS], dataclasses.replace(EVERY_STEP, policy="gradients"), 3),
    ],
)
def test_averages_after_every_step_are_synchronous_sgd(overrides: list[str], sync: Sync, workers: int) -> None:
    """Replicas that are averaged after each step train like one worker if momentum and clipping are common."""
    simulation = simulate(overrides, workers, sync)
    assert largest_difference(simulation.commons[10], simulate_synchronous(overrides)) < 1e-13


@pytest.mark.parametrize("overlap", [False, True])
def test_an_outer_step_of_one_is_an_average(overlap: bool) -> None:
    """An outer learning rate of 1 without momentum moves the common weights to the average; per lr or not."""
    periodic = simulate(SGD, 3, Sync(k=3, overlap=overlap))
    for per_lr in (False, True):
        settings = {"outer_lr": 1.0, "outer_momentum": 0.0, "outer_nesterov": False, "outer_per_lr": per_lr}
        assert apart(simulate(SGD, 3, Sync("outer", k=3, overlap=overlap, **settings)), periodic) < 1e-14


@pytest.mark.parametrize("delay", [1, 3])
def test_a_delay_does_not_change_a_single_replica(delay: int) -> None:
    """Its own update is not applied twice."""
    alone = simulate(SGD, 1, Sync(k=3, overlap=True, delay=delay)).commons[10]
    assert largest_difference(alone, simulate_synchronous(SGD)) < 1e-14


def test_accumulated_updates_over_one_step_are_an_average() -> None:
    """With k = 1, accumulated updates and moved weights have the same average."""
    assert apart(simulate(ADAMW, 3, Sync("accumulated", k=1)), simulate(ADAMW, 3, EVERY_STEP)) < 1e-14


def test_post_local_over_everything_is_synchronous() -> None:
    """A share of 1 leaves nothing local, a share of 0 everything."""
    whole = simulate(SGD, 3, Sync("accumulated", k=3, schedule="post_local", synchronous_share=1.0))
    assert largest_difference(whole.commons[10], simulate_synchronous(SGD)) < 1e-13
    none = simulate(SGD, 3, Sync("accumulated", k=3, schedule="post_local", synchronous_share=0.0))
    assert apart(none, simulate(SGD, 3, Sync("accumulated", k=3))) == 0


def test_wires_round_once_for_each_worker_and_once_for_the_sum() -> None:
    """bf16 keeps 8 bits and fp16 11; numbers that fp16 would lose are saved by the factor."""
    one_and_a_bit, half = torch.tensor([1 + 2**-8 + 2**-20]).double(), torch.tensor([2**-9]).double()
    assert weighted_sum([one_and_a_bit], [1.0], "bf16").tolist() == [1 + 2**-7]
    assert weighted_sum([torch.ones(1).double(), half], [1.0, 1.0], "bf16").tolist() == [1.0]
    assert weighted_sum([torch.ones(1).double(), 2 * half], [1.0, 1.0], "fp16").tolist() == [1 + 2**-8]
    assert weighted_sum([torch.tensor([2.0**-30]).double()], [1.0], "fp16").tolist() == [2.0**-30]


def test_learning_rates_are_the_schedules() -> None:
    """Warm-up over a tenth of 200 samples: from 0 over one step, then falling from the peak to its end."""
    reference = Reference(SGD)
    peak = 0.05 * 24 / 48
    assert reference.lrs()[:2] == pytest.approx([0, peak * (200 - 24) / 180])
    assert reference.lrs()[-1] == pytest.approx(peak * 4 / 180)
    constant = Reference([*SGD, "schedule=constant", "schedule.warmup_share=0"])
    assert constant.lrs() == pytest.approx([peak] * 10)
