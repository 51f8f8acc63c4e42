"""With `equivalence=exact`, dropout on, every split of the global batch ends alike: 54 steps, five world sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.grid import SHAPES, SPLITS, loss_difference, overrides, train, weight_differences, without_gradient
from tests.pool import WorkerPool

pytestmark = pytest.mark.long


def rounded(metrics: dict[str, float]) -> dict[str, float]:
    """The loss is a sum of a hundred terms, whose order is that of the workers; the others are counts."""
    return {name: round(value, 12) if name == "loss" else value for name, value in metrics.items()}


def all_splits(pool: WorkerPool, shape: str, optimizer: str, precision: str) -> tuple[dict[str, Any], list[Any]]:
    runs = [pool.run(n, train, overrides(shape, optimizer, precision, steps))[0] for n, steps in SPLITS]
    return runs[0], runs[1:]


@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 1e-12), ("adamw", 1e-9)])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp64(pool: WorkerPool, shape: str, optimizer: str, tolerance: float) -> None:
    """Weights within 1e-12 (SGD) and 1e-9 (AdamW) of one worker's, the same ledger digest and the same metrics."""
    one, others = all_splits(pool, shape, optimizer, "fp64")
    assert one["steps"] == len(one["losses"]) == 54
    for other in others:
        assert max(weight_differences(one, other).values()) < tolerance
        assert loss_difference(one, other) < 1e-12
        assert float((one["logits"] - other["logits"]).abs().max()) < tolerance
        assert other["digest"] == one["digest"]
        assert rounded(other["metrics"]) == rounded(one["metrics"])


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32(pool: WorkerPool, shape: str) -> None:
    """SGD in fp32: the bounds are some ten times what docs/equivalence.md lists as measured."""
    one, others = all_splits(pool, shape, "sgd", "fp32")
    for other in others:
        assert max(weight_differences(one, other).values()) < 2e-6
        assert loss_difference(one, other) < 3e-6
        assert float((one["logits"] - other["logits"]).abs().max()) < 4e-6
        assert other["digest"] == one["digest"]


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_adamw(pool: WorkerPool, shape: str) -> None:
    """AdamW in fp32: the same, but for weights without a gradient, which move at the learning rate and at random."""
    one, others = all_splits(pool, shape, "adamw", "fp32")
    for other in others:
        weights = weight_differences(one, other)
        assert max(value for name, value in weights.items() if not without_gradient(name)) < 2e-6
        assert max(value for name, value in weights.items() if without_gradient(name)) < 54 * 1e-3
        assert loss_difference(one, other) < 3e-6
        assert other["digest"] == one["digest"]


def test_the_grid_can_fail(pool: WorkerPool) -> None:
    """Without exact dropout the same splits end elsewhere, and training has moved every weight that has a gradient."""
    exact = overrides("bert", "sgd", "fp64", 1)
    one = pool.run(1, train, exact)[0]
    standard = pool.run(2, train, [*exact, "equivalence=standard"])[0]
    start = pool.run(1, train, [*exact, "max_steps=1", "optimizer.lr=1e-30"])[0]
    assert max(weight_differences(one, standard).values()) > 1e-4
    moved = weight_differences(one, start)
    assert min(value for name, value in moved.items() if not without_gradient(name)) > 1e-6
