"""Averages on models made by hand: weights, running statistics, and what is left at the end."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.config.choices import Compress
from runner.sync import StepFacts, SyncPolicy
from runner.sync.local_phases import LocalPhases
from runner.sync.replica import running_statistics
from runner.sync.updates import CollectedUpdates, MovingUpdates
from tests.pool import WorkerPool

FLOATS = ("weight", "bias", "running_mean", "running_var")


def make(name: str, model: nn.Module, backend: Backend, due: Iterable[int]) -> SyncPolicy:
    updates = {"moving": MovingUpdates, "collected": CollectedUpdates}[name]
    return LocalPhases(model, running_statistics(model), backend, Compress.none, frozenset(due), make_updates=updates)


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for name in FLOATS:
            getattr(model, name).add_(by)


def average(
    backend: Backend, name: str, counts: list[int], due: list[int], steps: int
) -> tuple[dict[str, Tensor], list[bool]]:
    """A batch-norm model after `steps` steps, each of which moves every float of worker r by r."""
    model = nn.BatchNorm1d(3)
    for tensor in (*model.parameters(), model.running_mean, model.running_var):
        nn.init.zeros_(tensor)
    policy = make(name, model, backend, due)
    equal = []
    for step in range(steps):
        move(model, float(backend.rank))
        equal.append(policy.after_step(StepFacts(step, counts[backend.rank], sum(counts), 0.1)))
    policy.finish()
    policy.close()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, equal


@pytest.mark.parametrize("name", ["moving", "collected"])
@pytest.mark.parametrize(("counts", "mean"), [([1, 1], 0.5), ([3, 1], 0.25), ([1, 0], 0.0)])
def test_averages_are_weighted_by_loss_terms(pool: WorkerPool, name: str, counts: list[int], mean: float) -> None:
    """Each worker weighs what it has trained on, and running statistics are averaged with the weights."""
    for state, equal in pool.run(2, average, name, counts, [1], 2):
        assert equal == [False, True]
        for tensor in FLOATS:
            assert state[tensor].tolist() == [2 * mean] * 3


def test_without_any_loss_term_all_weigh_the_same(pool: WorkerPool) -> None:
    """A window without a label is no division by zero."""
    for state, _ in pool.run(2, average, "moving", [0, 0], [1], 2):
        assert state["weight"].tolist() == [1.0] * 3


@pytest.mark.parametrize("name", ["moving", "collected"])
def test_finish_averages_what_is_left(pool: WorkerPool, name: str) -> None:
    """Steps after the last synchronisation are brought together at the end, and only then."""
    for state, equal in pool.run(2, average, name, [1, 1], [3], 6):
        assert equal == [False, False, False, True, False, False]
        assert state["weight"].tolist() == [3.0] * 3


def close_to_bounds(backend: Backend) -> list[bool]:
    """Whether a model whose policy has let go of it keeps its values, in memory of its own."""
    model = nn.Linear(5, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    policy = make("moving", model, backend, [0])
    shared = len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    policy.close()
    own = len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 2
    return [shared, own, *(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())]


def test_weights_share_one_memory_while_they_are_synchronised(pool: WorkerPool) -> None:
    """A collective works on the weights themselves; a model that is saved afterwards is a model like any other."""
    assert all(pool.run(2, close_to_bounds)[0])
