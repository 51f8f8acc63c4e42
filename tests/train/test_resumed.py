"""A run that is saved, rebuilt and continued ends with the same bits as one that was not stopped."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.errors import UserError
from runner.folder.metrics_log import MetricsReader
from runner.train.checkpoint import redistributed
from tests.pool import WorkerPool
from tests.replicas import make_loop, tiny_job
from tests.resumed import (
    WITHOUT_EFFECT,
    same,
    train_in_parts,
    train_killed,
    train_part,
    train_paused,
    train_preempted,
    train_whole,
)
from tests.sync.batch_norm_recipe import BATCH_NORM
from tests.sync.reference import ADAMW, EXACT, SGD, largest_difference
from tests.sync.simulation import DILOCO, SLOWMO, Sync

#: After every step: within epochs and at their ends, within local phases, right after synchronisations, and with an
#: average in flight. Step 5 and step 10 have the tails, of 4 samples in place of 24.
EVERY_STEP = tuple(range(1, 10))
DROPOUT = ["recipe.model.dropout=0.1", "recipe.model.attention_dropout=0.1"]
#: Steps 1 to 4 are fully synchronous.
LATE = Sync(k=3, schedule="post_local", synchronous_share=0.4)
BEST = ["evaluation.every_steps=2", "evaluation.keep_best=true", "evaluation.patience=3"]

#: Each policy, schedule, way to overlap, precision, kind of dropout and optimizer at least once.
COVERING = [
    (Sync(k=1), [*ADAMW, *DROPOUT, "precision=fp32", "accumulation.steps=2", *BEST]),
    (Sync(k=1), [*SGD, *EXACT, "precision=fp64"]),
    (LATE, [*ADAMW, *BATCH_NORM, "precision=bf16"]),
    (Sync(k=3, compress="bf16"), ["optimizer=muon", *DROPOUT, "precision=bf16"]),
    (Sync(k=4, overlap=True, delay=2, compress="bf16"), [*ADAMW, *DROPOUT, "precision=fp16"]),
    (replace(LATE, policy="outer", overlap=True, delay=2), [*ADAMW, *EXACT, "precision=bf16"]),
    (replace(SLOWMO, k=3, overlap=True, delay=3, schedule="qsr"), [*SGD, *DROPOUT, "precision=fp32"]),
    (Sync("accumulated", k=3, overlap=True, delay=3), [*SGD, *DROPOUT, "precision=fp32"]),
    (Sync("accumulated", k=2, schedule="qsr"), [*SGD, "schedule.warmup_share=0.3", "precision=fp16"]),
    (Sync("gradients", k=3, compress="fp16"), [*ADAMW, *DROPOUT, "precision=fp32"]),
    (replace(DILOCO, k=4, fragments=3, overlap=True, delay=2), [*ADAMW, *DROPOUT, "precision=fp32"]),
    (Sync(k=3, compress="int8", overlap=True, delay=2, fragments=2), [*ADAMW, *DROPOUT, "precision=fp32"]),
]

#: Those that can overlap, and average fragments.
POLICIES = (Sync(), DILOCO, SLOWMO, Sync("accumulated"))


def grid() -> list[list[str]]:
    """Every pair of policy, schedule and overlap; precisions and kinds of dropout take turns."""
    schedules: tuple[dict[str, Any], ...] = ({}, {"schedule": "qsr"}, {"schedule": "post_local"})
    overlaps: tuple[dict[str, Any], ...] = (
        *({}, {"overlap": True, "delay": 1}, {"overlap": True, "delay": 3}),
        *({"fragments": 2}, {"fragments": 3, "overlap": True, "delay": 2}),
    )
    turns = itertools.cycle(itertools.product(("fp32", "bf16", "fp16", "fp64"), (DROPOUT, EXACT)))
    pairs = [Sync("gradients", k=3, **schedule) for schedule in schedules]
    pairs += [
        replace(policy, k=3, **schedules[(row + column) % len(schedules)], **overlap)
        for row, policy in enumerate(POLICIES)
        for column, overlap in enumerate(overlaps)
    ]
    return [
        [*ADAMW, *sync.overrides(), f"precision={precision}", *dropout]
        for sync, (precision, dropout) in zip(pairs, turns, strict=False)
    ]


def check(pool: WorkerPool, overrides: list[str], stops: tuple[int, ...] = EVERY_STEP) -> None:
    whole = pool.run(2, train_whole, overrides)
    parts = pool.run(2, train_in_parts, overrides, stops)
    for a, b in zip(whole, parts, strict=True):
        assert not isinstance(b, str), b
        assert [part for part in a["state"] if not same(a["state"][part], b["state"][part])] == []
        assert [key for key in a if not same(a[key], b[key])] == []
        assert a.keys() == b.keys()


@pytest.mark.parametrize(
    ("sync", "overrides"),
    COVERING,
    ids=lambda value: "-".join(value.overrides()) if isinstance(value, Sync) else value[-1],
)
def test_a_resumed_run_ends_with_the_same_bits(pool: WorkerPool, sync: Sync, overrides: list[str]) -> None:
    """Weights, optimizer, random state, metrics and ledger, stopped after every step."""
    check(pool, [*overrides, *sync.overrides()])


@pytest.mark.parametrize(
    ("sync", "overrides", "moments"),
    [
        (*COVERING[0], [("step", 1), ("evaluation", 2), ("evaluation", 4), ("step", 6)]),
        (Sync(k=3), [*ADAMW, *DROPOUT, "evaluation.every_steps=3"], [("step", 1), ("evaluation", 6)]),
        (Sync(k=2, overlap=True, delay=1), [*ADAMW, *DROPOUT], [("step", 1)]),
    ],
    ids=["k=1", "k=3", "overlap"],
)
def test_a_preempted_run_ends_with_the_same_bits(
    pool: WorkerPool, sync: Sync, overrides: list[str], moments: list[tuple[str, int]]
) -> None:
    """One worker is asked, in a step or in an evaluation, which is then not done twice; all save the same step."""
    settings = [*overrides, *sync.overrides()]
    whole = pool.run(2, train_whole, settings)
    preempted = pool.run(2, train_preempted, settings, moments)
    assert all(map(same, whole, preempted))


@pytest.mark.parametrize(("sync", "overrides"), [COVERING[0], COVERING[10]], ids=["k=1", "fragments"])
def test_a_run_that_a_race_pauses_ends_with_the_same_bits(pool: WorkerPool, sync: Sync, overrides: list[str]) -> None:
    """Its evaluations at the rungs change neither the best one nor when training ends."""
    settings = [*overrides, *sync.overrides()]
    whole = pool.run(2, train_whole, settings)
    assert all(map(same, whole, pool.run(2, train_paused, settings, (1, 2, 5))))


@pytest.mark.long
@pytest.mark.parametrize("overrides", grid(), ids=lambda overrides: "-".join(overrides[2:]))
def test_every_policy_ends_with_the_same_bits(pool: WorkerPool, overrides: list[str]) -> None:
    try:
        tiny_job(overrides, 2)
    except UserError as error:
        pytest.skip(str(error))
    check(pool, overrides)


#: A run in which each part of the state matters, and a step to stop at.
OVERLAPPED = [*DILOCO.overrides(), "sync.k=2", "sync.overlap=true", "sync.delay=1", "precision=fp32"]
CONTROLS = {
    "model": ([*ADAMW], 3),
    "buffers": ([*ADAMW, *BATCH_NORM, "precision=fp32"], 3),
    "optimizer": ([*ADAMW], 3),
    "scaler": ([*ADAMW, "precision=fp16"], 3),
    "order": ([*ADAMW], 3),
    "policy": ([*ADAMW, *OVERLAPPED], 3),
    "ledger": ([*ADAMW], 3),
    "meter": ([*ADAMW], 3),
    "noise": ([*ADAMW, "noise.every_steps=1"], 3),
    "finite": ([*ADAMW], 3),
    "best": ([*ADAMW, *BEST], 3),
    "optimizer_step": ([*ADAMW], 3),
    "synchronisations": ([*ADAMW, "sync.k=2"], 3),
    "evaluation": ([*ADAMW, "sync.k=3"], 5),  # due at the end of the epoch, and done after the next synchronisation
    "tokens": ([*ADAMW], 3),
    "random": ([*ADAMW, *DROPOUT], 3),
}


def test_every_part_of_the_state_has_a_control(pool: WorkerPool) -> None:
    state = pool.run(1, train_whole, [*ADAMW, "max_steps=1"])[0]["state"]
    assert {*state, "policy", "synchronisations"} == {*CONTROLS, *WITHOUT_EFFECT}


@pytest.mark.parametrize("part", CONTROLS)
def test_a_part_left_out_is_noticed(pool: WorkerPool, part: str) -> None:
    """The comparison above fails if any part of the state is that of a new run."""
    overrides, stop = CONTROLS[part]
    whole = pool.run(2, train_whole, overrides)[0]
    parts = pool.run(2, train_in_parts, overrides, (stop,), part)[0]
    assert isinstance(parts, str) or not same(whole, parts)


@pytest.mark.parametrize("order", ["permutation", "keyed"])
def test_other_numbers_of_workers_continue_a_run(pool: WorkerPool, tmp_path: Path, order: str) -> None:
    """1, 2, 5, 4, 3 and 1 workers within two epochs: the ledger and learning rates of one worker, its weights to 1e-12.

    Neither 5 workers nor the tail of 4 samples divide evenly.
    """
    overrides = [*SGD, *EXACT, f"batch.order={order}"]
    whole = pool.run(1, train_whole, overrides)[0]
    logged = {}
    for workers, until in ((1, 2), (2, 4), (5, 6), (4, 7), (3, 9), (1, None)):
        part = pool.run(workers, train_part, overrides, tmp_path, until)[0]
        logged |= part["logged"]
    assert largest_difference(part["weights"], whole["weights"]) < 1e-12
    assert part["ledger"] == whole["ledger"]
    for (name, step), value in whole["logged"].items():
        exact = name in ("train/lr", "train/samples_seen")
        assert logged[name, step] == (value if exact else pytest.approx(value, rel=1e-9)), (name, step)


@pytest.mark.parametrize(
    ("settings", "stops"),
    [(["sync.k=2"], (4, 6, 8)), ([*DILOCO.overrides(), "sync.k=2"], (4, 6, 8)), (LATE.overrides(), (4, 7, 8))],
    ids=str,
)
def test_other_numbers_of_workers_continue_local_phases(
    pool: WorkerPool, tmp_path: Path, settings: list[str], stops: tuple[int, ...]
) -> None:
    """2, 3, 1 and 2 workers, each from a synchronisation: every sample once, equal weights in the end."""
    overrides = [*ADAMW, *settings]
    for workers, until in zip((2, 3, 1, 2), (*stops, None), strict=True):
        results = pool.run(workers, train_part, overrides, tmp_path, until)
        assert until is None or results[0]["synchronised"]
    assert [(epoch["missing"], epoch["duplicated"]) for epoch in results[0]["ledger"]] == [(0, 0), (0, 0)]
    assert largest_difference(results[0]["weights"], results[1]["weights"]) == 0


def test_another_sync_policy_continues_a_run(pool: WorkerPool, tmp_path: Path) -> None:
    """From the common weights of local phases: then two workers train what one does, and DiLoCo goes on from there."""
    for copy in ("on-1", "on-2", "diloco"):
        results = pool.run(2, train_part, [*SGD, *EXACT, "sync.k=2"], tmp_path / copy, 4)
        assert results[0]["synchronised"]
    synchronous = [pool.run(n, train_part, [*SGD, *EXACT, "sync.k=1"], tmp_path / f"on-{n}", None)[0] for n in (1, 2)]
    assert largest_difference(synchronous[0]["weights"], synchronous[1]["weights"]) < 1e-12
    assert synchronous[0]["ledger"] == synchronous[1]["ledger"]
    outer = pool.run(2, train_part, [*SGD, *EXACT, *DILOCO.overrides(), "sync.k=2"], tmp_path / "diloco", None)
    assert outer[0]["ledger"] == synchronous[0]["ledger"]
    assert largest_difference(outer[0]["weights"], synchronous[0]["weights"]) > 1e-6


def test_another_precision_continues_a_run(pool: WorkerPool, tmp_path: Path) -> None:
    """Only in fp16 has the loss scaler a state."""
    for precision, until in (("fp32", 3), ("fp16", 6), ("bf16", None)):
        (result,) = pool.run(1, train_part, [*ADAMW, f"precision={precision}"], tmp_path, until)
    assert [(epoch["missing"], epoch["duplicated"]) for epoch in result["ledger"]] == [(0, 0), (0, 0)]


def test_fragments_begin_in_the_middle_of_a_round(pool: WorkerPool, tmp_path: Path) -> None:
    """All start at once, where one worker stopped, and some of them again before that average is due."""
    overrides = [*ADAMW, "sync.k=4", "sync.fragments=4", "sync.overlap=true", "sync.delay=4"]
    pool.run(1, train_part, overrides, tmp_path, 3)
    results = pool.run(2, train_part, overrides, tmp_path, None)
    assert [(epoch["missing"], epoch["duplicated"]) for epoch in results[0]["ledger"]] == [(0, 0), (0, 0)]
    assert largest_difference(results[0]["weights"], results[1]["weights"]) == 0


def test_an_average_that_was_in_flight_is_logged_once(pool: WorkerPool, tmp_path: Path) -> None:
    """The killed run has finished and logged it after the checkpoint, at the step in which it was started before."""
    overrides = [*ADAMW, *replace(DILOCO, k=4, fragments=2, overlap=True, delay=4).overrides()]
    pool.run(2, train_killed, overrides, tmp_path, 5, 9)
    logged = MetricsReader(tmp_path).read()
    assert max(Counter((metric.key, metric.step) for metric in logged).values()) == 1
    seconds = {metric.step: metric.value for metric in logged if metric.key == "sync/seconds"}
    assert set(seconds) > {2, 4}
    assert min(seconds.values()) > 0


def test_optimizer_state_of_other_workers_is_their_mean(pool: WorkerPool) -> None:
    """A worker that has not stepped yet counts nowhere; counts go to worker 0, and the ledger to all."""
    states = [
        {**state, "optimizer": {} if rank == 2 else state["optimizer"]}
        for rank, state in enumerate(pool.run(3, state_after, [*ADAMW, "sync.k=2"], 2))
    ]
    shares = [redistributed(states, ("model", "policy"), rank, 2) for rank in range(2)]
    moments = [state["optimizer"][0]["exp_avg"] for state in states[:2]]
    assert not same(moments[0], moments[1])
    for share in shares:
        assert same(share["optimizer"][0]["exp_avg"], (moments[0] + moments[1]) / 2)
        assert same(share["model"], states[0]["model"])
        assert share["random"] is None
    assert [share["ledger"]["open"]["samples_seen"] for share in shares] == [48, 48]
    assert shares[0]["tokens"] == [sum(column) for column in zip(*(s["tokens"] for s in states), strict=True)]


def state_after(backend: Any, overrides: list[str], steps: int) -> Any:
    loop = make_loop(backend, overrides)
    loop.train(until=steps)
    state = loop.state_dict()
    loop.policy.close()
    return state
