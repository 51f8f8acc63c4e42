"""After which steps workers synchronise."""

from __future__ import annotations

import dataclasses

import pytest

from runner.config.choices import ScheduleName, SyncPolicyName, SyncSchedule
from runner.config.schema import Schedule, Sync
from runner.errors import UserError
from runner.plan import Plan, make_plan
from runner.plan.sync_steps import SyncSteps, sync_steps
from tests.configured import configured

CONSTANT_LR = Schedule(ScheduleName.constant)


def plan(steps: int, workers: int = 2, warmup_share: float = 0.0) -> Plan:
    """A run of `steps` optimizer steps of ten samples each."""
    settings = f"batch.global_batch=10 scaling=none epochs=1 optimizer.lr=0.1 schedule.warmup_share={warmup_share}"
    return make_plan(configured(settings), 10 * steps, workers)


def steps(count: int, k: int, workers: int = 2) -> tuple[int, list[int]]:
    found = sync_steps(plan(count, workers), Sync(SyncPolicyName.periodic, k), CONSTANT_LR)
    return found.first_local, sorted(found.due)


def test_constant() -> None:
    """Every k-th step."""
    assert steps(10, 4) == (0, [3, 7])
    assert steps(8, 4) == (0, [3, 7])
    assert steps(5, 5) == (0, [4])


def test_synchronous_runs_have_no_local_phase() -> None:
    """k = 1, and a single worker for any k."""
    assert steps(10, 1) == (10, [])
    assert steps(10, 4, workers=1) == (10, [])
    outer = Sync(SyncPolicyName.accumulated, 1)
    assert sync_steps(plan(3), outer, CONSTANT_LR) == SyncSteps(0, frozenset({0, 1, 2}))


def test_post_local() -> None:
    """Synchronous until the share of the samples has been seen; k counts from there."""
    sync = Sync(SyncPolicyName.periodic, 2, schedule=SyncSchedule.post_local)
    assert sync_steps(plan(10), sync, CONSTANT_LR) == SyncSteps(5, frozenset({6, 8}))
    sync = Sync(SyncPolicyName.periodic, 3, schedule=SyncSchedule.post_local, synchronous_share=0.33)
    assert sync_steps(plan(10), sync, CONSTANT_LR) == SyncSteps(4, frozenset({6, 9}))


def test_post_local_needs_a_local_phase() -> None:
    sync = Sync(SyncPolicyName.periodic, 2, schedule=SyncSchedule.post_local, synchronous_share=0.95)
    with pytest.raises(UserError, match=r"^sync\.synchronous_share=0\.95 .* 10 optimizer steps"):
        sync_steps(plan(10), sync, CONSTANT_LR)


def quadratic(count: int, k: int, alpha: float | None, schedule: Schedule) -> list[int]:
    sync = Sync(SyncPolicyName.periodic, k, schedule=SyncSchedule.qsr, qsr_alpha=alpha)
    return sorted(sync_steps(plan(count, warmup_share=schedule.warmup_share), sync, schedule).due)


def test_quadratic_rule_with_a_constant_rate_is_constant() -> None:
    """⌊(alpha / lr)²⌋ steps, but never fewer than k."""
    assert quadratic(10, 2, 0.2, CONSTANT_LR) == [3, 7]
    assert quadratic(10, 2, 0.1, CONSTANT_LR) == [1, 3, 5, 7, 9]
    assert quadratic(10, 3, None, CONSTANT_LR) == [2, 5, 8]


def test_quadratic_rule_by_hand() -> None:
    """A rate that falls from 0.1 to 0 over 100 steps: phases of 4, 4, 4 (0.92: 4.7), 5 (0.88: 5.2) steps, and so on."""
    due = quadratic(100, 4, None, Schedule(ScheduleName.linear))
    expected, step = [], 0
    while True:
        rate = (100 - step) / 100
        step += max(4, int(4 / rate**2 + 1e-9))
        if step > 100:
            break
        expected.append(step - 1)
    assert due == expected
    assert due[:4] == [3, 7, 11, 16]
    assert due[-1] - due[-2] == 20


def test_quadratic_rule_in_the_warm_up() -> None:
    """While the learning rate still rises, phases have the length of the peak."""
    due = quadratic(100, 4, None, Schedule(ScheduleName.linear, warmup_share=0.2))
    assert due[:5] == [3, 7, 11, 15, 19]


@pytest.mark.parametrize(
    ("alpha", "lr", "length"),
    [
        (None, 1e-200, 2),
        (0.2, 1e200, 2),
        (3e200, 1e200, 9),
        (100.0, 0.1, None),
        (1e200, 1e-200, None),
    ],
)
def test_quadratic_rule_with_extreme_numbers(alpha: float | None, lr: float, length: int | None) -> None:
    """No square overflows or underflows. `length`: steps of a phase; None for one to the end of the run."""
    sync = Sync(SyncPolicyName.periodic, 2, schedule=SyncSchedule.qsr, qsr_alpha=alpha)
    due = sync_steps(dataclasses.replace(plan(10), lr=lr), sync, CONSTANT_LR).due
    assert sorted(due) == ([] if length is None else list(range(length - 1, 10, length)))
