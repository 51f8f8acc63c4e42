"""The loop of synchronous workers against plain torch, and what it does besides training.

tests/sync/test_simulated.py compares the other policies with a simulation of n replicas.
"""

from __future__ import annotations

from typing import Any

import pytest

from runner.errors import UserError
from tests.pool import WorkerPool
from tests.replicas import (
    count_all_reduces,
    tiny_job,
    train,
    train_with_high_loss_scale,
    train_with_wrong_dealing,
)
from tests.sync.reference import ADAMW, EXACT, SGD, largest_difference, simulate_synchronous

#: An average that is in flight while training continues.
OVERLAP = ["sync.k=2", "sync.overlap=true", "sync.delay=1"]
#: A learning rate at which nothing improves.
NO_PROGRESS = ["optimizer=sgd", "optimizer.lr=1e-12", "evaluation.every_steps=2", "evaluation.patience=2"]
FP32_DROPOUT = [*ADAMW, "precision=fp32", "recipe.model.dropout=0.1"]


def steps_with(key: str, logged: list[tuple[int, dict[str, float]]]) -> list[int]:
    return [step for step, metrics in logged if key in metrics]


@pytest.fixture(scope="module")
def one_worker(pool: WorkerPool) -> dict[str, Any]:
    settings = {
        "sgd": SGD,
        "adamw": ADAMW,
        "exact": [*SGD, *EXACT],
        "gpt2": [*SGD, *EXACT, "recipe.model.shape=gpt2"],
        "keyed": [*SGD, "batch.order=keyed"],
    }
    return {name: (own, pool.run(1, train, own)[0]) for name, own in settings.items()}


def test_one_worker_equals_plain_torch(one_worker: dict[str, Any]) -> None:
    """Batches, loss, schedule, clipping and step are those of a loop written by hand."""
    assert largest_difference(one_worker["sgd"][1]["weights"], simulate_synchronous(SGD)) < 1e-13


@pytest.mark.parametrize(
    ("name", "workers", "accumulation", "tolerance"),
    [
        ("sgd", 8, 1, 1e-12),
        ("sgd", 2, 3, 1e-12),
        ("adamw", 3, 1, 1e-9),
        ("adamw", 1, 2, 1e-9),
        ("exact", 8, 3, 1e-12),
        ("exact", 2, 1, 1e-12),
        ("gpt2", 3, 2, 1e-12),
        ("keyed", 3, 2, 1e-12),
    ],
)
def test_synchronous_training_does_not_depend_on_the_split(
    pool: WorkerPool, one_worker: dict[str, Any], name: str, workers: int, accumulation: int, tolerance: float
) -> None:
    """With k = 1 world size and accumulation change rounding only. With 8 workers 4 have no sample in the tail."""
    settings, expected = one_worker[name]
    plan = tiny_job(settings, 1).plan
    assert plan.samples_per_epoch % plan.global_batch == 4
    results = pool.run(workers, train, [*settings, f"accumulation.steps={accumulation}"])
    for result in results:
        assert largest_difference(result["weights"], expected["weights"]) < tolerance
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        assert result["ledger"] == expected["ledger"]
    losses = [[m["train/loss"] for _, m in r["logged"] if "train/loss" in m] for r in (results[0], expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert len(losses[0]) == 10
    assert all(not result["logged"] for result in results[1:])


def test_accumulation_communicates_once_per_optimizer_step(pool: WorkerPool) -> None:
    assert pool.run(2, count_all_reduces, [*SGD, "accumulation.steps=3"], 4) == [(4, 12), (4, 12)]


def test_evaluating_more_often_does_not_change_training(pool: WorkerPool) -> None:
    """Though evaluation draws from every generator, and dropout from one of them."""
    settings = [
        "recipe._target_=tests.odd_recipe.Drawing",
        "trusted_packages=[recipes,tests]",
        "recipe.model.dropout=0.1",
    ]
    often, seldom = (pool.run(1, train, [*settings, f"evaluation.every_steps={n}"])[0]["weights"] for n in (1, 1000))
    assert largest_difference(often, seldom) == 0.0


def test_runs_are_repeatable_and_depend_on_the_seed(pool: WorkerPool) -> None:
    others = ("seed=0", "seed=1", "recipe.model.dropout=0")
    base, again, seed, dropout = (
        pool.run(1, train, [*FP32_DROPOUT, "max_steps=3", other])[0]["weights"] for other in ("seed=0", *others)
    )
    assert largest_difference(base, again) == 0
    assert largest_difference(base, seed) > 1e-3
    assert largest_difference(base, dropout) > 1e-6


@pytest.mark.parametrize(
    "settings", [[], ["sync.k=2"], ["sync=accumulated", "sync.k=2"], ["sync=outer", *OVERLAP]], ids=str
)
def test_fp16_steps_skipped_by_the_scaler(pool: WorkerPool, settings: list[str]) -> None:
    """They are counted, the ledger stays sound, and workers agree on loss scale and weights."""
    results = pool.run(2, train_with_high_loss_scale, [*ADAMW, "precision=fp16", *settings])
    epochs = results[0]["ledger"]
    assert 0 < sum(epoch["skipped"] for epoch in epochs) < 200
    assert all(epoch["missing"] == epoch["duplicated"] == 0 for epoch in epochs)
    assert results[0]["scale"] == results[1]["scale"] < 2.0**24
    assert all(weight.isfinite().all() for weight in results[0]["weights"].values())
    assert largest_difference(results[0]["weights"], results[1]["weights"]) == 0


@pytest.mark.parametrize(
    ("mistake", "settings", "words"),
    [
        ("every worker reads everything", [], "counted 48 loss terms where 24 were planned"),
        ("a worker reads another's share", [], "optimizer step 1: of 24 planned samples 12 were missing"),
        ("a worker skips its last sample", [], "counted 23 loss terms where 24 were planned"),
        ("a worker skips its last sample", OVERLAP, "counted 23 loss terms where 24 were planned"),
        ("a worker reads another's share", ["ledger=warn"], "nothing: 50 missing, 50 twice, 50 missing, 50 twice"),
    ],
)
def test_wrong_data_end_the_run(pool: WorkerPool, mistake: str, settings: list[str], words: str) -> None:
    """On all workers alike, unless `ledger=warn`."""
    for answer in pool.run(2, train_with_wrong_dealing, [*SGD, *settings], mistake):
        assert words in answer


@pytest.mark.parametrize("settings", [[], OVERLAP])
def test_patience_ends_the_run(pool: WorkerPool, settings: list[str]) -> None:
    """All workers stop together after `patience` evaluations without improvement."""
    results = pool.run(2, train, [*NO_PROGRESS, *settings])
    first, *_, last = steps_with("eval/accuracy", results[0]["logged"])
    assert results[0]["best"][0] == first
    assert [result["steps"] for result in results] == [last, last]
    assert last < 10
    if not settings:
        assert (first, last) == (2, 6)
        assert [epoch["expected"] for epoch in results[0]["ledger"]] == [100, 24]
    assert largest_difference(results[0]["weights"], results[1]["weights"]) == 0


def test_evaluation_waits_for_a_synchronisation(pool: WorkerPool) -> None:
    """Epochs end after steps 5 and 10, synchronisations after 4, 8 and 10."""
    logged = pool.run(2, train, [*SGD, "sync.k=4"])[0]["logged"]
    assert steps_with("eval/accuracy", logged) == [8, 10]


@pytest.mark.parametrize(
    ("settings", "flushed"),
    [
        (["log_every=3"], [1, 4, 5, 8, 10]),  # the first step, every 3 steps, and the ends of epochs
        (["log_every=100"], [1, 5, 10]),
        (["log_every=3", "sync.k=2"], [1, 4, 5, 6, 10]),  # at synchronisations; evaluation waits for the one of step 6
        (["log_every=1", "sync.k=4", "evaluation.every_steps=1000"], [1, 4, 5, 8, 10]),
    ],
)
def test_log_every(pool: WorkerPool, settings: list[str], flushed: list[int]) -> None:
    """Every step's loss is logged in order; throughput and communication once per flush."""
    logged = pool.run(2, train, [*SGD, *settings])[0]["logged"]
    assert steps_with("train/loss", logged) == list(range(1, 11))
    assert steps_with("comm/bytes", logged) == flushed
    assert steps_with("train/samples_per_s", logged) == flushed[1:]


def test_max_steps_shortens_run_and_schedule(pool: WorkerPool) -> None:
    result = pool.run(1, train, [*SGD, "max_steps=4", "schedule.warmup_share=0"])[0]
    lrs = [metrics["train/lr"] for _, metrics in result["logged"] if "train/lr" in metrics]
    assert lrs == pytest.approx([0.05 * f * 24 / 48 for f in (1, 0.75, 0.5, 0.25)])
    assert result["ledger"][0]["samples_seen"] == 96


def test_log_every_is_at_least_one_step() -> None:
    with pytest.raises(UserError, match="log_every=0"):
        tiny_job(["log_every=0"], 1)
