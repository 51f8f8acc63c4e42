"""k = 1 through torch's DDP: a parameter without a gradient is an error."""

from __future__ import annotations

import torch

from tests.pool import WorkerPool
from tests.replicas import refusal, train

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
