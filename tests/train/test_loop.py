"""The loop of fully synchronous workers against plain torch, and what it does besides training.

tests/sync/test_simulated.py has the other policies, against a simulation of n replicas.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import WorkerPool
from tests.replicas import (
    TINY,
    count_all_reduces,
    tiny_job,
    train,
    train_in_two_parts,
    train_with_high_loss_scale,
    train_with_wrong_dealing,
)
from tests.sync.reference import ADAMW, EXACT, SGD, largest_difference, simulate_synchronous

#: Name, settings, and how far apart splits may end. Exact dropout is tried with SGD here, and with both in test_grid.
CASES = [
    ("sgd", SGD, 1e-12),
    ("adamw", ADAMW, 1e-9),
    ("sgd, exact dropout", [*SGD, *EXACT], 1e-12),
    ("sgd, exact dropout, gpt2", [*SGD, *EXACT, "recipe.model.shape=gpt2"], 1e-12),
]


@pytest.fixture(scope="module")
def one_worker(pool: WorkerPool) -> dict[str, Any]:
    return {name: pool.run(1, train, settings)[0] for name, settings, _ in CASES}


def test_one_worker_equals_plain_torch(one_worker: dict[str, Any]) -> None:
    """The loop's batches, loss, schedule, clipping and step are those of a loop written out by hand."""
    assert largest_difference(one_worker["sgd"]["weights"], simulate_synchronous(SGD)) < 1e-13


def test_evaluating_more_often_changes_no_training(pool: WorkerPool) -> None:
    """Though evaluation itself draws from every generator, and dropout draws from one of them."""
    settings = [
        "recipe._target_=tests.odd_recipe.Drawing",
        "trusted_packages=[recipes,tests]",
        "recipe.model.dropout=0.1",
    ]
    often, seldom = (pool.run(1, train, [*settings, f"evaluation.every_steps={n}"])[0]["weights"] for n in (1, 1000))
    assert largest_difference(often, seldom) == 0.0


@pytest.mark.parametrize(("workers", "accumulation"), [(1, 2), (2, 1), (2, 3), (3, 1), (8, 1), (8, 3)])
@pytest.mark.parametrize(("name", "settings", "tolerance"), CASES)
def test_synchronous_training_does_not_depend_on_the_split(
    pool: WorkerPool,
    one_worker: dict[str, Any],
    workers: int,
    accumulation: int,
    name: str,
    settings: list[str],
    tolerance: float,
) -> None:
    """With k = 1, world size and accumulation change nothing but rounding, uneven tails and idle workers included."""
    results = pool.run(workers, train, [*settings, f"accumulation.steps={accumulation}"])
    expected = one_worker[name]
    for result in results:
        assert largest_difference(result["weights"], expected["weights"]) < tolerance
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        assert result["ledger"] == expected["ledger"]
    losses = [[m["train/loss"] for _, m in r["logged"] if "train/loss" in m] for r in (results[0], expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert len(losses[0]) == 10
    assert all(not result["logged"] for result in results[1:])


def test_accumulation_communicates_once_an_optimizer_step(pool: WorkerPool) -> None:
    """Gradients travel on the last micro-batch of a step only."""
    assert pool.run(2, count_all_reduces, [*SGD, "accumulation.steps=3"], 4) == [(4, 12), (4, 12)]


@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_ends_with_the_same_weights(pool: WorkerPool, stop: int) -> None:
    """Stopping within an epoch and at its end changes not one bit, dropout on, in fp32."""
    overrides = [*ADAMW, "precision=fp32", "recipe.model.dropout=0.1", "accumulation.steps=2"]
    whole = pool.run(2, train, overrides)
    parts = pool.run(2, train_in_two_parts, overrides, stop)
    for a, b in zip(whole, parts, strict=True):
        assert largest_difference(a["weights"], b["weights"]) == 0
        assert a["metrics"] == b["metrics"]
        assert a["ledger"] == b["ledger"]


def test_dropout_is_on_in_the_resume_test(pool: WorkerPool) -> None:
    """The test above would prove little without dropout: with it, another share of it gives other weights."""
    with_it, without = (
        pool.run(1, train, [*ADAMW, "precision=fp32", f"recipe.model.dropout={p}"])[0] for p in (0.1, 0.0)
    )
    assert largest_difference(with_it["weights"], without["weights"]) > 1e-6


def test_seeds_make_runs_repeatable_and_different(pool: WorkerPool) -> None:
    """One seed gives the same bits twice; seed 0 is a seed like any other."""
    overrides = [*ADAMW, "precision=fp32", "recipe.model.dropout=0.1", "max_steps=3"]
    zero, again, one = (pool.run(1, train, [*overrides, f"seed={seed}"])[0]["weights"] for seed in (0, 0, 1))
    assert largest_difference(zero, again) == 0
    assert largest_difference(zero, one) > 1e-3


def test_steps_skipped_by_the_scaler_are_counted_and_no_failure(pool: WorkerPool) -> None:
    """An overflowing loss scale skips steps on all workers alike; the ledger says so and stays sound."""
    results = pool.run(2, train_with_high_loss_scale, [*ADAMW, "precision=fp16"])
    epochs = results[0]["ledger"]
    assert 0 < sum(epoch["skipped"] for epoch in epochs) < 200
    assert all(epoch["missing"] == epoch["duplicated"] == 0 for epoch in epochs)
    assert results[0]["scale"] < 2.0**24
    assert largest_difference(results[0]["weights"], results[1]["weights"]) == 0


@pytest.mark.parametrize("k", [1, 2])
def test_fp16_replicas_agree_on_the_loss_scale(pool: WorkerPool, k: int) -> None:
    """After a synchronisation every worker goes on with the smallest scale of all."""
    results = pool.run(2, train_with_high_loss_scale, [*ADAMW, "precision=fp16", f"sync.k={k}"])
    assert results[0]["scale"] == results[1]["scale"]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (
            "every worker reads everything",
            "LedgerError: optimizer step 1: the recipe counted 48 loss terms where 24 were planned",
        ),
        ("a worker reads another's share", "LedgerError: epoch 0: of 100 planned samples 50 were missing, 50 came"),
        (
            "a worker skips its last sample",
            "LedgerError: optimizer step 1: the recipe counted 23 loss terms where 24 were planned",
        ),
    ],
)
def test_wrong_data_end_the_run(pool: WorkerPool, mistake: str, said: str) -> None:
    """Samples that are not those planned are found by count or by the ledger, on all workers alike."""
    for answer in pool.run(2, train_with_wrong_dealing, SGD, mistake):
        assert answer.startswith(said)


def test_wrong_data_can_be_let_pass(pool: WorkerPool) -> None:
    """With `ledger=warn` the run goes on, and the ledger has what was wrong."""
    mistake = "a worker reads another's share"
    answers = pool.run(2, train_with_wrong_dealing, [*SGD, "ledger=warn"], mistake)
    assert answers == ["nothing: 50 missing, 50 twice, 50 missing, 50 twice"] * 2


@pytest.mark.parametrize("policy", ["sync.k=2", "sync=accumulated sync.k=2", "sync=outer sync.k=2"])
@pytest.mark.parametrize("how", ["", "sync.overlap=true sync.delay=1"])
def test_fp16_trains_under_every_local_policy(pool: WorkerPool, policy: str, how: str) -> None:
    """Steps that the scaler skips on one worker or on both leave equal replicas, finite weights and a sound ledger."""
    results = pool.run(2, train_with_high_loss_scale, [*ADAMW, "precision=fp16", *policy.split(), *how.split()])
    epochs = results[0]["ledger"]
    assert 0 < sum(epoch["skipped"] for epoch in epochs) < 200
    assert all(epoch["missing"] == epoch["duplicated"] == 0 for epoch in epochs)
    assert all(weight.isfinite().all() for weight in results[0]["weights"].values())
    assert largest_difference(results[0]["weights"], results[1]["weights"]) == 0


#: An average that travels while steps go on.
OVERLAP = ["sync.k=2", "sync.overlap=true", "sync.delay=1"]


def test_wrong_counts_are_found_though_losses_come_late(pool: WorkerPool) -> None:
    """With overlap nobody waits for losses, and a recipe that counts wrongly still ends the run, a flush later."""
    mistake = "a worker skips its last sample"
    for answer in pool.run(2, train_with_wrong_dealing, [*SGD, *OVERLAP], mistake):
        assert answer.startswith(
            "LedgerError: optimizer step 1: the recipe counted 23 loss terms where 24 were planned"
        )


def test_early_stop_with_overlap(pool: WorkerPool) -> None:
    """Patience counts the evaluations at common weights; all workers stop together and end equal."""
    overrides = ["optimizer=sgd", "optimizer.lr=1e-12", "evaluation.every_steps=2", "evaluation.patience=2", *OVERLAP]
    results = pool.run(2, train, overrides)
    assert results[0]["steps"] == results[1]["steps"] < 10
    evaluated = [step for step, metrics in results[0]["logged"] if "eval/accuracy" in metrics]
    assert results[0]["best"][0] == evaluated[0]
    assert largest_difference(results[0]["weights"], results[1]["weights"]) == 0


def test_early_stop_ends_the_run_after_patience(pool: WorkerPool) -> None:
    """Training that cannot improve (a learning rate of almost 0) stops after `patience` further evaluations."""
    overrides = ["optimizer=sgd", "optimizer.lr=1e-12", "evaluation.every_steps=2", "evaluation.patience=2"]
    results = pool.run(2, train, overrides)
    assert [result["steps"] for result in results] == [6, 6]
    assert results[0]["best"][0] == 2
    assert [epoch["expected"] for epoch in results[0]["ledger"]] == [100, 24]


def test_evaluation_waits_for_a_synchronisation(pool: WorkerPool) -> None:
    """Epochs of 5 steps end between synchronisations of k = 4: evaluation comes after steps 8 and 10, never at 5."""
    logged = pool.run(2, train, [*SGD, "sync.k=4"])[0]["logged"]
    assert [step for step, metrics in logged if "eval/accuracy" in metrics] == [8, 10]


def test_max_steps_ends_run_and_schedule(pool: WorkerPool) -> None:
    """`max_steps` cuts the run short, and the learning rate falls to its end by then."""
    result = pool.run(1, train, [*SGD, "max_steps=4", "schedule.warmup_share=0"])[0]
    lrs = [metrics["train/lr"] for _, metrics in result["logged"] if "train/lr" in metrics]
    assert lrs == pytest.approx([0.05 * f * 24 / 48 for f in (1, 0.75, 0.5, 0.25)])
    assert result["ledger"][0]["samples_seen"] == 96


def test_tiny_has_a_tail() -> None:
    """The grid above would prove little if the global batch divided the data."""
    plan = tiny_job([], 1).plan
    assert plan.samples_per_epoch % plan.global_batch == 4
    assert "recipe.data.train_samples=100" in TINY
