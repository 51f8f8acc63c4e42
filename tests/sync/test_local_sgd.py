"""Local SGD on tiny models whose averages are known: weights, running statistics, the end of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.config.choices import Compress, SyncPolicyName
from runner.config.schema import Sync
from runner.sync import StepFacts, SyncPolicy, vectors
from runner.sync.local_sgd import LocalSGD
from runner.sync.published import AccumulatedUpdates
from runner.sync.replica_vector import ReplicaVector
from runner.sync.running_statistics import running_statistics
from runner.sync.streaming import StreamingSGD
from tests.pool import WorkerPool

PERIODIC = Sync(SyncPolicyName.periodic, 4)


def outer(lr: float, momentum: float, nesterov: bool, **others: Any) -> Sync:
    """Settings with an outer optimizer."""
    return Sync(
        SyncPolicyName.outer,
        6,
        outer_lr=lr,
        outer_momentum=momentum,
        outer_nesterov=nesterov,
        outer_per_lr=False,
        **others,
    )


FLOATS = ("weight", "bias", "running_mean", "running_var")


def make(accumulate: bool, model: nn.Module, backend: Backend, due: Collection[int]) -> SyncPolicy:
    replica = ReplicaVector(model, running_statistics(model), backend)
    if accumulate:
        return AccumulatedUpdates(replica, backend, Sync(SyncPolicyName.accumulated, 4), due)
    return LocalSGD(replica, backend, PERIODIC, due)


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for name in FLOATS:
            getattr(model, name).add_(by)


def average(
    backend: Backend, accumulate: bool, counts: list[int], due: list[int], steps: int
) -> tuple[dict[str, Tensor], list[bool]]:
    """A batch-norm model after `steps` steps, each of which moves every float of worker r by r."""
    model = nn.BatchNorm1d(3)
    for tensor in (*model.parameters(), model.running_mean, model.running_var):
        nn.init.zeros_(tensor)
    policy = make(accumulate, model, backend, due)
    synchronised = []
    for step in range(steps):
        move(model, float(backend.rank))
        synchronised.append(policy.after_step(StepFacts(step, 2, 1, counts[backend.rank], sum(counts), 0.1)))
    policy.finish()
    policy.close()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, synchronised


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("counts", "mean"), [([3, 1], 0.25), ([1, 0], 0.0)])
def test_averages_are_weighted_by_loss_terms(
    pool: WorkerPool, accumulate: bool, counts: list[int], mean: float
) -> None:
    """Running statistics are averaged like the weights."""
    for state, synchronised in pool.run(2, average, accumulate, counts, [1], 2):
        assert synchronised == [False, True]
        for tensor in FLOATS:
            assert state[tensor].tolist() == [2 * mean] * 3


def test_weights_are_equal_in_a_phase_without_loss_terms(pool: WorkerPool) -> None:
    """There is no division by zero."""
    for state, _ in pool.run(2, average, False, [0, 0], [1], 2):
        assert state["weight"].tolist() == [1.0] * 3


@pytest.mark.parametrize("accumulate", [False, True])
def test_finish_averages_the_last_steps(pool: WorkerPool, accumulate: bool) -> None:
    """Steps after the last synchronisation are averaged at the end."""
    for state, synchronised in pool.run(2, average, accumulate, [1, 1], [3], 6):
        assert synchronised == [False, False, False, True, False, False]
        assert state["weight"].tolist() == [3.0] * 3


#: The two fragments of a model before each step of torchft's fixture test_diloco_mocked_updates_0, without delay or
#: mixing: weights that begin at 1 fall by 2 in each step; 6 steps to a round; the outer optimizer is SGD of lr 2.
TORCHFT = (
    [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
    [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
)


def diloco_history(backend: Backend) -> list[list[list[float]]]:
    """The different weights of each fragment before each step."""
    model = nn.Linear(4, 8, bias=False)
    nn.init.ones_(model.weight)
    replica = ReplicaVector(model, [], backend)
    policy = StreamingSGD(replica, backend, outer(2.0, 0.0, False, fragments=2), [5, 11, 17])
    history = []
    for step in range(len(TORCHFT[0])):
        history.append([part.unique().tolist() for part in model.weight.detach().flatten().split(16)])
        with torch.no_grad():
            model.weight.sub_(2)
        policy.after_step(StepFacts(step, 2, 1, 1, 2, 0.1))
    policy.close()
    return history


def test_streaming_diloco_is_torchfts(pool: WorkerPool) -> None:
    for history in pool.run(2, diloco_history):
        assert history == [[[first], [second]] for first, second in zip(*TORCHFT, strict=True)]


def close_policy(backend: Backend) -> list[bool]:
    """Whether parameters share memory until the policy is closed, and keep their values afterwards."""
    model = nn.Linear(5, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    policy = make(False, model, backend, [0])
    shared = len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    policy.close()
    own = len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 2
    return [shared, own, *(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())]


def test_parameters_share_memory_until_close(pool: WorkerPool) -> None:
    """The collective works on the weights themselves, and the model can be saved afterwards."""
    assert all(pool.run(2, close_policy)[0])


def in_chunks(backend: Backend, size: int, compress: Compress, overlaps: bool, with_outer: bool) -> tuple[Tensor, Any]:
    """Weights and the policy's state, with an average in flight or not, from chunks of `size` numbers."""
    with mock.patch.dict(vectors._CHUNK, cpu=size):
        torch.manual_seed(0)
        model = nn.BatchNorm1d(1000)
        options = {"compress": compress, "fragments": 2, "overlap": overlaps, "delay": 1 if overlaps else None}
        sync = outer(0.7, 0.9, True, **options) if with_outer else replace(PERIODIC, **options)
        replica = ReplicaVector(model, running_statistics(model), backend)
        policy = StreamingSGD(replica, backend, sync, range(1, 20, 2))
        torch.manual_seed(backend.rank)
        for step in range(8):
            with torch.no_grad():
                for name in FLOATS:
                    getattr(model, name).add_(torch.randn(1000))
            policy.after_step(StepFacts(step, 2, 1, 1 + backend.rank, 3, 0.1))
        state = policy.state_dict()
        tensors = [fragment["tensors"] for fragment in state["fragments"]]
        policy.finish()
        policy.close()
    return torch.cat([getattr(model, name).detach() for name in FLOATS]), tensors


@pytest.mark.parametrize(
    ("compress", "overlaps", "with_outer"),
    [(Compress.none, False, False), (Compress.bf16, True, True), (Compress.int8, True, False)],
)
def test_chunks_change_no_bit(pool: WorkerPool, compress: Compress, overlaps: bool, with_outer: bool) -> None:
    """Only telemetry adds up what is processed together."""
    whole, small = (pool.run(2, in_chunks, size, compress, overlaps, with_outer) for size in (2**18, 256))
    for (weights, tensors), (same, others) in zip(whole, small, strict=True):
        assert torch.equal(weights, same)
        for fragment, other in zip(tensors, others, strict=True):
            assert all(torch.equal(fragment[name], other[name]) for name in fragment)
