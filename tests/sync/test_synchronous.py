"""k = 1 through torch's DDP: a parameter without a gradient is an error; rows of embeddings; gradients of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runner.backends import Backend
from runner.sync.low_rank import LowRankGradients
from tests.pool import WorkerPool
from tests.replicas import Weights, make_loop, refusal, train
from tests.sync.reference import SGD, largest_difference

HALF_USED = ["recipe._target_=tests.odd_recipe.HalfUsed", "trusted_packages=[recipes,tests]", "max_steps=3"]


def test_a_parameter_without_a_gradient_is_named(pool: WorkerPool) -> None:
    """DDP would leave other gradients unaveraged."""
    for message in pool.run(2, refusal, HALF_USED):
        assert "unread.weight" in message
        assert "sync.k" in message


def test_a_gradient_of_an_earlier_micro_batch_is_not_enough(pool: WorkerPool) -> None:
    """DDP averages in the last backward pass of a step."""
    sometimes = ["recipe._target_=tests.odd_recipe.SometimesUsed", *HALF_USED[1:]]
    for message in pool.run(2, refusal, [*sometimes, "accumulation.steps=2"]):
        assert "unread.weight" in message
    assert set(pool.run(2, refusal, [*sometimes, "accumulation.steps=3", "max_steps=1"])) == {""}


def test_other_policies_leave_such_a_parameter_as_it_is(pool: WorkerPool) -> None:
    """A single worker, and workers that average weights."""
    (alone,) = pool.run(1, train, HALF_USED)
    two, _ = pool.run(2, train, [*HALF_USED, "sync.k=2"])
    for name in ("unread.weight", "unread.bias"):
        assert torch.equal(alone["weights"][name], two["weights"][name])


def train_with_rows(backend: Backend, overrides: list[str], least_bytes: int) -> dict[str, Any]:
    """`least_bytes`: of embeddings of which rows are sent."""
    with mock.patch("runner.sync.synchronous._SENT_AS_ROWS_BYTES", least_bytes):
        return train(backend, overrides)


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        (["accumulation.steps=3"], 2),
        (["sync.k=2", "sync.schedule=post_local"], 2),
        (["equivalence=exact", "recipe.model.dropout=0.1"], 2),
        (["recipe._target_=tests.odd_recipe.Penalised", "trusted_packages=[recipes,tests]"], 2),
        ([], 8),
    ],
    ids=["accumulation", "then local", "exact", "used as a whole", "without samples"],
)
def test_rows_of_embeddings_give_the_same_training(pool: WorkerPool, overrides: list[str], workers: int) -> None:
    """Also for workers that have no samples in the last step of an epoch, and after DDP has gone."""
    rows, other, *_ = pool.run(workers, train_with_rows, overrides, 0)
    whole, *_ = pool.run(workers, train_with_rows, overrides, 2**40)
    assert largest_difference(rows["weights"], other["weights"]) == 0
    assert largest_difference(rows["weights"], whole["weights"]) < (1e-15 if workers == 2 else 1e-12)
    assert rows["stats"].bytes != whole["stats"].bytes


def test_a_model_of_embeddings_alone_is_averaged(pool: WorkerPool) -> None:
    """DDP would refuse to have none of its weights."""
    alone = ["recipe._target_=tests.odd_recipe.OnlyAnEmbedding", "trusted_packages=[recipes,tests]"]
    rows, other = pool.run(2, train_with_rows, alone, 0)
    assert largest_difference(rows["weights"], other["weights"]) == 0


def test_seconds_of_a_run_that_is_continued(pool: WorkerPool) -> None:
    """They stay those of the steps in which they were measured."""
    for before, loaded, after in pool.run(2, seconds_of_a_continued_run, ["sync.k=1"]):
        assert loaded == before
        assert all(0 <= now - earlier < 1 for now, earlier in zip(after, loaded, strict=True))


def seconds_of_a_continued_run(backend: Backend, overrides: list[str]) -> list[tuple[float, float]]:
    """Of communication and of stalls: saved, loaded by a new run, and after one more step."""
    first = make_loop(backend, overrides)
    first.train(until=3)
    state = first.state_dict()
    state["policy"] = {**state["policy"], "steps": 3, "ddp_seconds": (7.0, 2.0)}
    first.policy.close()
    found = [(7.0, 2.0)]
    second = make_loop(backend, overrides)
    second.load_state_dict(state)
    for until in (3, 4):
        second.train(until=until)
        stats = second.policy.stats()
        assert stats.seconds is not None
        found.append((stats.seconds, stats.backward_stall_seconds))
    second.policy.close()
    return found


@dataclass
class LowRank:
    """By parameter, over a run: sums of a worker's gradients and of those that were applied, the last that was applied,
    and what PowerSGD has left out at the end."""

    own: Weights
    applied: Weights
    last: Weights
    left_out: Weights
    sent: int


def train_at_low_rank(backend: Backend, overrides: list[str]) -> LowRank:
    loop = make_loop(backend, overrides)
    names = {parameter: name for name, parameter in loop.model.named_parameters()}
    own, applied, last = ({name: torch.zeros_like(p.detach()) for p, name in names.items()} for _ in range(3))
    hook, step = LowRankGradients.__call__, loop._optimizer_step

    def watched_hook(self: LowRankGradients, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            own[names[parameter]] = own[names[parameter]] + gradient
        return hook(self, bucket)

    def watched_step(needs_norm: bool) -> Any:
        for parameter, name in names.items():
            assert parameter.grad is not None
            last[name] = parameter.grad.clone()
            applied[name] = applied[name] + parameter.grad
        return step(needs_norm)

    watch_step = mock.patch.object(loop, "_optimizer_step", watched_step)
    with mock.patch.object(LowRankGradients, "__call__", watched_hook), watch_step:
        loop.train()
    state, sent = loop.policy.state_dict()["low_rank"]["by_name"], loop.policy.stats().bytes
    shapes = {name: p.shape for p, name in names.items()}
    left_out = {name: parts["left_out"].view(shapes[name]) for name, parts in state.items()}
    loop.policy.close()
    return LowRank(own, applied, last, left_out, sent)


def test_what_power_sgd_leaves_out_is_added_later(pool: WorkerPool) -> None:
    """Gradients of matrices have a low rank and are equal on all workers. Their sum lacks what is still left out."""
    steps, rank = 6, 2
    settings = [*SGD, "sync.compress=powersgd", f"sync.rank={rank}", f"max_steps={steps}"]
    one, two = pool.run(2, train_at_low_rank, settings)
    shapes = {name: tensor.shape for name, tensor in one.own.items()}
    low = {name for name, shape in shapes.items() if len(shape) == 2 and 2 * rank * sum(shape) < shape.numel()}
    shares = []
    for name in shapes:
        assert torch.equal(one.applied[name], two.applied[name])
        missing = (one.own[name] + two.own[name]) / 2 - one.applied[name]
        assert torch.allclose(missing, (one.left_out[name] + two.left_out[name]) / 2, rtol=0, atol=1e-13)
        shares.append(float(missing.norm() / one.own[name].norm()))
        if name in low:
            assert torch.linalg.matrix_rank(one.last[name]) <= rank
    assert max(shares) > 1e-3  # some gradients have a higher rank
    whole = sum(shape.numel() for shape in shapes.values())
    products = sum(rank * sum(shape) if name in low else shape.numel() for name, shape in shapes.items())
    assert one.sent == 8 * (2 * whole + (steps - 2) * products)
