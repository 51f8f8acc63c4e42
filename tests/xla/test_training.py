"""Training on XLA's CPU device against plain CPU workers: one experiment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.pool import WorkerPool
from tests.xla import work
from tests.xla.work import EXACT, SGD, STANDARD, TAIL, apart, trained

#: How far apart fp32 runs on the two devices may end, as shares of a loss, of the largest logit and of the largest
#: weight of a tensor: kernels add in another order. Seen: docs/tpu.md.
FP32 = 1e-5

Result = dict[str, Any]


@pytest.fixture(scope="module")
def on_cpu(pool: WorkerPool) -> Callable[[int, list[str]], Result]:
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
    assert apart(ours["logits"], theirs["logits"]) < tolerance
    far = {name: apart(weight, theirs["weights"][name]) for name, weight in ours["weights"].items()}
    assert max(far.values()) < tolerance, max(far, key=far.__getitem__)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=tolerance)


def assert_replicas_equal(results: list[Result]) -> None:
    for result in results[1:]:
        for name, weight in results[0]["weights"].items():
            assert torch.equal(weight, result["weights"][name]), name


@pytest.mark.parametrize(
    ("workers", "overrides"),
    [
        (1, []),
        (2, []),
        (2, ["accumulation.steps=2"]),
        (1, ["recipe.model.shape=gpt2"]),
    ],
)
def test_exact_training_is_that_of_one_cpu_worker(
    xla_pool: WorkerPool, on_cpu: Callable[[int, list[str]], Result], workers: int, overrides: list[str]
) -> None:
    """fp32, dropout on, an uneven tail: losses, logits, weights and the ledger are those of one plain CPU worker."""
    common = [*SGD, *EXACT, *TAIL, "precision=fp32"]
    results = xla_pool.run(workers, trained, [*common, *overrides])
    shape = [option for option in overrides if "shape" in option]
    assert_same(results[0], on_cpu(1, [*common, *shape]), FP32)
    assert_replicas_equal(results)


def test_in_fp64_it_is_the_same_arithmetic(xla_pool: WorkerPool, on_cpu: Callable[[int, list[str]], Result]) -> None:
    """What is left of the differences is rounding: in fp64 two replicas are within 1e-8 of one plain CPU worker."""
    common = [*SGD, *EXACT, *TAIL, "precision=fp64"]
    results = xla_pool.run(2, trained, common)
    assert_same(results[0], on_cpu(1, common), 1e-8)


def test_adamw_is_torchs(xla_pool: WorkerPool, on_cpu: Callable[[int, list[str]], Result]) -> None:
    """The unfused AdamW that XLA compiles is the fused one of the CPU: compared in fp64, where Adam amplifies less."""
    common = ["optimizer=adamw", *EXACT, *TAIL, "precision=fp64"]
    assert_same(xla_pool.run(1, trained, common)[0], on_cpu(1, common), 1e-8)


@pytest.mark.parametrize("overrides", [[], ["accumulation.steps=2"]])
def test_periodic_averaging_is_that_of_cpu_workers(
    xla_pool: WorkerPool, on_cpu: Callable[[int, list[str]], Result], overrides: list[str]
) -> None:
    """k = 4 over two replicas, one of them idle in the tail: as two plain CPU workers do it."""
    common = [*SGD, *EXACT, *TAIL, "precision=fp32", "sync.k=4"]
    results = xla_pool.run(2, trained, [*common, *overrides])
    theirs = on_cpu(2, [*common, *overrides])
    assert_same(results[0], theirs, FP32)
    assert_replicas_equal(results)
    assert results[0]["stats"].synchronisations == theirs["stats"].synchronisations
    assert results[0]["stats"].bytes == theirs["stats"].bytes


@pytest.mark.parametrize("policy", ["sync=outer sync.k=2", "sync=accumulated sync.k=2", "sync.k=4 sync.compress=bf16"])
def test_other_policies_are_those_of_cpu_workers(
    xla_pool: WorkerPool, on_cpu: Callable[[int, list[str]], Result], policy: str
) -> None:
    """An outer optimizer, collected updates and averages in bf16 over two replicas, as two plain CPU workers do it."""
    common = [*SGD, *EXACT, *TAIL, "precision=fp32", *policy.split()]
    results = xla_pool.run(2, trained, common)
    theirs = on_cpu(2, common)
    # What is rounded to bf16 on the way can fall to either side of a last bit.
    assert_same(results[0], theirs, 1e-2 if "bf16" in policy else FP32)
    assert_replicas_equal(results)
    assert results[0]["stats"].synchronisations == theirs["stats"].synchronisations


def test_bf16_is_close_to_the_cpus(xla_pool: WorkerPool, on_cpu: Callable[[int, list[str]], Result]) -> None:
    """Autocast reaches XLA: results are those of bf16 on plain CPU workers, roughly, and not those of fp32."""
    common = [*SGD, *EXACT, *TAIL]
    ours = xla_pool.run(1, trained, [*common, "precision=bf16"])[0]
    theirs, full = on_cpu(1, [*common, "precision=bf16"]), on_cpu(1, [*common, "precision=fp32"])
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=0.02)
    assert np.abs(ours["losses"] / full["losses"] - 1).max() > 1e-4
    assert ours["ledger"] == full["ledger"]


def test_stopping_and_going_on_changes_no_bit(xla_pool: WorkerPool) -> None:
    """The state holds XLA's own random stream: with standard dropout, two parts end as the whole does."""
    common = [*STANDARD, *TAIL, "precision=fp32"]
    whole = xla_pool.run(1, trained, common)[0]["weights"]
    parts = xla_pool.run(1, work.trained_in_two_parts, common, 3)[0]
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name


def test_how_often_losses_are_read_changes_no_bit(xla_pool: WorkerPool) -> None:
    """Reading follows the clock. It must not move XLA's random stream on, as torch_xla.sync does."""
    common = [*STANDARD, *TAIL, "precision=fp32"]
    often, rarely = (xla_pool.run(1, work.trained_with_meter, common, stretch)[0] for stretch in (1, 100))
    for name, weight in often.items():
        assert torch.equal(weight, rarely[name]), name


def test_evaluating_changes_no_bit(xla_pool: WorkerPool) -> None:
    """Nor does evaluating after every step instead of after every epoch."""
    common = [*STANDARD, *TAIL, "precision=fp32"]
    rarely, often = (
        xla_pool.run(1, trained, [*common, f"evaluation.every_steps={every}"])[0]["weights"] for every in ("null", 1)
    )
    for name, weight in often.items():
        assert torch.equal(weight, rarely[name]), name


#: The built-in recipe as it is, but for the length of the run.
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
    """The first step has programs of its own, since the optimizer's state is new in it; after the second there are no
    more. In between nothing is read back, but for the gloo collective of each step where there are two replicas."""
    compilations, reads, warning = xla_pool.run(workers, work.compiled_by_step, DEFAULT, 12)[0]
    assert sum(compilations) <= 4
    assert sum(compilations[:2]) == sum(compilations) > 0
    assert max(reads) <= (0 if workers == 1 else 1)
    assert warning is None


def test_batches_of_many_shapes_are_named(xla_pool: WorkerPool) -> None:
    """A recipe that pads as it likes is compiled for every shape, and told so with the shape."""
    overrides = [*SGD, "precision=fp32", "recipe.data.train_samples=480"]
    compilations, warning = xla_pool.run(1, work.with_ragged_batches, overrides)[0]
    assert compilations >= 16
    assert warning is not None
    assert "compilations after the first 10 optimizer steps" in warning
    assert "input_ids [24, " in warning
    assert "device.length_buckets" in warning
