"""Periodic averaging on models made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.choices import SyncPolicyName
from runner.schema import Sync
from runner.sync import PeriodicAveraging, Synchronous, build_sync_policy
from tests.pool import WorkerPool


def average(backend: Backend, counts: list[int], k: int, steps: int) -> tuple[dict[str, Tensor], list[bool]]:
    """A batch-norm model whose every float is the rank, after `steps` steps without training."""
    model = nn.BatchNorm1d(3)
    for tensor in (*model.parameters(), model.running_mean, model.running_var):
        nn.init.constant_(tensor, float(backend.rank))
    policy = PeriodicAveraging(model, backend, k)
    equal = [policy.after_step(step, counts[backend.rank], sum(counts)) for step in range(steps)]
    policy.finish()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, equal


@pytest.mark.parametrize(("counts", "mean"), [([1, 1], 0.5), ([3, 1], 0.25), ([0, 5], 1.0), ([0, 0], 0.5)])
def test_average_is_weighted_by_loss_terms(pool: WorkerPool, counts: list[int], mean: float) -> None:
    """Each worker weighs what it has trained on; without any loss term all weigh the same. Buffers are averaged too."""
    for state, equal in pool.run(2, average, counts, 2, 2):
        assert equal == [False, True]
        for name in ("weight", "bias", "running_mean", "running_var"):
            assert state[name].tolist() == [mean] * 3


def test_finish_averages_what_is_left(pool: WorkerPool) -> None:
    """Steps after the last full window are averaged at the end, and only then."""
    for state, equal in pool.run(2, average, [1, 1], 4, 3):
        assert equal == [False, False, False]
        assert state["weight"].tolist() == [0.5] * 3


def kinds(backend: Backend) -> list[str]:
    """The policies for k = 1 and k = 4."""
    model = nn.Linear(2, 2)
    policies = [build_sync_policy(Sync(SyncPolicyName.periodic, k), model, backend) for k in (1, 4)]
    names = [type(policy).__name__ for policy in policies]
    for policy in policies:
        policy.close()
    return names


def test_which_policy(pool: WorkerPool) -> None:
    """k = 1 is synchronous, k > 1 periodic, and one worker always synchronous."""
    assert pool.run(2, kinds)[0] == [Synchronous.__name__, PeriodicAveraging.__name__]
    assert pool.run(1, kinds)[0] == [Synchronous.__name__] * 2


def state_after(backend: Backend, interrupted: bool) -> dict[str, Tensor]:
    """Three steps of k = 4, then two more; with a new policy in between if interrupted."""
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(backend.rank))
    policy = PeriodicAveraging(model, backend, 4)
    counts = [1, 3] if backend.rank else [3, 1]
    for step in range(3):
        policy.after_step(step, counts[0], 4)
    if interrupted:
        state, policy = policy.state_dict(), PeriodicAveraging(model, backend, 4)
        policy.load_state_dict(state)
    policy.after_step(3, counts[1], 4)
    return {"weight": model.weight.detach().clone(), "bytes": torch.tensor(policy.stats().bytes)}


def test_counts_survive_a_restart(pool: WorkerPool) -> None:
    """What was trained on before an interruption still weighs in the next average."""
    for whole, parts in zip(pool.run(2, state_after, False), pool.run(2, state_after, True), strict=True):
        assert torch.equal(whole["weight"], parts["weight"])
        assert whole["weight"].flatten().tolist() == [6 / 16] * 4
        assert whole["bytes"] == parts["bytes"] == 6 * 4
