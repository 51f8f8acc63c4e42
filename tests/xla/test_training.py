"""Training on XLA's CPU device compared with plain CPU workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.pool import WorkerPool
from tests.xla import work
from tests.xla.work import EXACT, SGD, STANDARD, TAIL, max_difference, trained

#: Tolerance between fp32 runs on the two devices, relative to a loss, to the largest logit and to a tensor's largest
#: weight, since kernels add in different orders. Measured: docs/tpu.md.
FP32 = 1e-5

Result = dict[str, Any]
OnCpu = Callable[[int, list[str]], Result]


@pytest.fixture(scope="module")
def on_cpu(pool: WorkerPool) -> OnCpu:
    """The same training on plain CPU workers, once for all tests that compare with it."""
    known: dict[tuple[int, tuple[str, ...]], Result] = {}

    def run(workers: int, overrides: list[str]) -> Result:
        key = workers, tuple(overrides)
        if key not in known:
            known[key] = pool.run(workers, trained, overrides)[0]
        return known[key]

    return run


def assert_same(ours: Result, theirs: Result, tolerance: float) -> None:
    assert ours["ledger"] == theirs["ledger"]
    assert ours["ledger"]["sound"]
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=tolerance)
    assert max_difference(ours["logits"], theirs["logits"]) < tolerance
    far = {name: max_difference(weight, theirs["weights"][name]) for name, weight in ours["weights"].items()}
    assert max(far.values()) < tolerance, max(far, key=far.__getitem__)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=tolerance)


def assert_replicas_equal(results: list[Result]) -> None:
    for result in results[1:]:
        for name, weight in results[0]["weights"].items():
            assert torch.equal(weight, result["weights"][name]), name


@pytest.mark.parametrize(("workers", "own"), [(2, ["accumulation.steps=2"]), (1, ["recipe.model.shape=gpt2"])])
def test_exact_training_equals_one_cpu_worker(
    xla_pool: WorkerPool, on_cpu: OnCpu, workers: int, own: list[str]
) -> None:
    """fp32, dropout on, an uneven tail: the losses, logits, weights and ledger of one plain CPU worker."""
    common = [*SGD, *EXACT, *TAIL, "precision=fp32"]
    results = xla_pool.run(workers, trained, [*common, *own])
    assert_same(results[0], on_cpu(1, [*common, *(option for option in own if "shape" in option)]), FP32)
    assert_replicas_equal(results)


def test_fp64_differs_by_rounding_only(xla_pool: WorkerPool, on_cpu: OnCpu) -> None:
    """In fp64 two replicas are within 1e-8 of one plain CPU worker; XLA's unfused AdamW is the CPU's fused one."""
    common = ["optimizer=adamw", *EXACT, *TAIL, "precision=fp64"]
    results = xla_pool.run(2, trained, common)
    assert_same(results[0], on_cpu(1, common), 1e-8)
    assert_replicas_equal(results)


@pytest.mark.parametrize(
    "policy", ["sync.k=4 accumulation.steps=2", "sync=outer sync.k=2", "sync.k=4 sync.compress=bf16"]
)
def test_local_phases_equal_those_of_cpu_workers(xla_pool: WorkerPool, on_cpu: OnCpu, policy: str) -> None:
    """Averages of weights, an outer optimizer and averages in bf16; one of two replicas has no samples in the tail."""
    common = [*SGD, *EXACT, *TAIL, "precision=fp32", *policy.split()]
    results = xla_pool.run(2, trained, common)
    expected = on_cpu(2, common)
    # Values that are rounded to bf16 can differ in the last bit of bf16.
    assert_same(results[0], expected, 1e-2 if "bf16" in policy else FP32)
    assert_replicas_equal(results)
    assert results[0]["stats"].synchronisations == expected["stats"].synchronisations
    assert results[0]["stats"].bytes == expected["stats"].bytes


def test_bf16_is_close_to_the_cpus(xla_pool: WorkerPool, on_cpu: OnCpu) -> None:
    """Autocast works on XLA: the results are close to those of bf16 on the CPU, and differ from those of fp32."""
    common = [*SGD, *EXACT, *TAIL]
    ours = xla_pool.run(1, trained, [*common, "precision=bf16"])[0]
    expected, full = on_cpu(1, [*common, "precision=bf16"]), on_cpu(1, [*common, "precision=fp32"])
    np.testing.assert_allclose(ours["losses"], expected["losses"], rtol=0.02)
    assert np.abs(ours["losses"] / full["losses"] - 1).max() > 1e-4
    assert ours["ledger"] == full["ledger"]


STANDARD_FP32 = [*STANDARD, *TAIL, "precision=fp32"]


@pytest.fixture(scope="module")
def uninterrupted(xla_pool: WorkerPool) -> dict[str, torch.Tensor]:
    """The weights of one run with standard dropout, which draws from XLA's own random stream."""
    weights: dict[str, torch.Tensor] = xla_pool.run(1, trained, STANDARD_FP32)[0]["weights"]
    return weights


def assert_equal(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


def test_resuming_changes_no_bit(xla_pool: WorkerPool, uninterrupted: dict[str, torch.Tensor]) -> None:
    """The saved state holds XLA's random stream."""
    assert_equal(uninterrupted, xla_pool.run(1, work.trained_in_two_parts, STANDARD_FP32, 3)[0])


def test_reading_losses_changes_no_bit(xla_pool: WorkerPool, uninterrupted: dict[str, torch.Tensor]) -> None:
    """Reading after every step must not advance XLA's random stream, as torch_xla.sync does."""
    assert_equal(uninterrupted, xla_pool.run(1, trained, [*STANDARD_FP32, "log_every=1"])[0]["weights"])


def test_evaluating_changes_no_bit(xla_pool: WorkerPool, uninterrupted: dict[str, torch.Tensor]) -> None:
    """Evaluating after every step instead of after every epoch."""
    every_step = xla_pool.run(1, trained, [*STANDARD_FP32, "evaluation.every_steps=1"])[0]["weights"]
    assert_equal(uninterrupted, every_step)


#: The built-in recipe, with a shorter run.
DEFAULT = [
    "recipe.data.train_samples=8000",
    "recipe.model.hidden_size=128",
    "recipe.model.feed_forward_size=128",
    "recipe.model.layers=2",
    "recipe.model.heads=8",
    "recipe.model.dropout=0.1",
    "batch.global_batch=48",
    "epochs=6",
    "precision=fp32",
    "seed=1",
]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_default_recipe_compiles_at_most_four_steps(xla_pool: WorkerPool, workers: int) -> None:
    """The first step has separate programs, since it creates the optimizer's state; after the second there are no new
    ones. Nothing is read back, except for the gloo collective of each step with two replicas."""
    compilations, reads, warning = xla_pool.run(workers, work.compiled_by_step, DEFAULT, 12)[0]
    assert sum(compilations) <= 4
    assert sum(compilations[:2]) == sum(compilations) > 0
    assert max(reads) <= (0 if workers == 1 else 1)
    assert warning is None


def test_batches_of_many_shapes_are_named(xla_pool: WorkerPool) -> None:
    """A recipe that pads to many lengths is compiled for every shape, and the warning names the shape."""
    overrides = [*SGD, "precision=fp32", "recipe.data.train_samples=480"]
    compilations, warning = xla_pool.run(1, work.with_ragged_batches, overrides)[0]
    assert compilations >= 16
    assert warning is not None
    assert "compilations after the first 10 optimizer steps" in warning
    assert "input_ids [24, " in warning
    assert "device.length_buckets" in warning
