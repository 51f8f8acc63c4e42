"""k = 1 through torch's DDP: what it cannot do is said in a sentence."""

from __future__ import annotations

import torch

from runner.backends import Backend
from runner.errors import UserError
from tests.pool import WorkerPool
from tests.replicas import train

HALF_USED = ["recipe._target_=tests.odd_recipe.HalfUsed", "trusted_packages=[recipes,tests]", "max_steps=3"]


def refusal(backend: Backend, overrides: list[str]) -> str:
    try:
        train(backend, overrides)
    except UserError as error:
        return str(error)
    return ""


def test_a_parameter_without_a_gradient(pool: WorkerPool) -> None:
    """DDP waits for a gradient that never comes, and would leave others unaveraged: refused, with the layer's name."""
    for said in pool.run(2, refusal, HALF_USED):
        assert "does not depend on unread.weight and 1 more" in said
        assert "requires_grad_(False)" in said
        assert "sync.k=2" in said


def test_a_gradient_of_an_earlier_micro_batch_only(pool: WorkerPool) -> None:
    """DDP averages in the last backward pass of a step: what only earlier ones reach is missing all the same."""
    sometimes = ["recipe._target_=tests.odd_recipe.SometimesUsed", *HALF_USED[1:]]
    for said in pool.run(2, refusal, [*sometimes, "accumulation.steps=2"]):
        assert "does not depend on unread.weight and 1 more" in said
    assert set(pool.run(2, refusal, [*sometimes, "accumulation.steps=3", "max_steps=1"])) == {""}


def test_it_trains_where_nobody_waits(pool: WorkerPool) -> None:
    """One worker, and workers that average weights, leave such a layer as it is."""
    (alone,) = pool.run(1, train, HALF_USED)
    two, _ = pool.run(2, train, [*HALF_USED, "sync.k=2"])
    for name in ("unread.weight", "unread.bias"):
        assert torch.equal(alone["weights"][name], two["weights"][name])
