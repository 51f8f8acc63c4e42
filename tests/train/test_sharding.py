"""Sharded models end like whole ones, on any number of workers, resumed anywhere, and are saved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.backends import Backend
from tests.pool import WorkerPool
from tests.replicas import make_loop, train, weights_of
from tests.resumed import same, train_part, train_preempted, train_whole
from tests.sync.batch_norm_recipe import BATCH_NORM
from tests.sync.reference import ADAMW, EXACT, SGD, largest_difference
from tests.train.test_resumed import BEST, DROPOUT, check

BLOCKS = ["recipe.model.layers=3"]
FSDP = [*BLOCKS, "sharding=fsdp"]
OFFLOAD = [*BLOCKS, "sharding=fsdp_offload"]
LORA = ["adapter=lora", "adapter.rank=2", "adapter.merge=true"]
QLORA = ["adapter=qlora", *LORA[1:]]


@pytest.mark.parametrize(
    ("workers", "overrides", "sharding"),
    [
        (1, [*SGD, *EXACT], OFFLOAD),
        (2, [*SGD, *EXACT, "optimizer.clip_norm=0.1"], FSDP),
        (6, [*ADAMW, *EXACT, "optimizer.weight_decay=0.1"], FSDP),
        (3, [*SGD, *EXACT, "accumulation.steps=4"], OFFLOAD),
        (2, [*SGD, *LORA], FSDP),
        (3, [*SGD, *QLORA], OFFLOAD),
        (2, [*SGD, "gradient_checkpointing=true", "accumulation.steps=3"], FSDP),
    ],
    ids=["one worker", "clipping", "6 workers", "accumulation", "adapter", "adapter, 4 bits", "checkpointing"],
)
def test_it_ends_like_one_worker(pool: WorkerPool, workers: int, overrides: list[str], sharding: list[str]) -> None:
    """In the tail of 4 samples two of 6 workers run only fillers, and with accumulation some micro-batches are."""
    one = pool.run(1, train, [*overrides, *BLOCKS, "accumulation.steps=1"])[0]
    for other in pool.run(workers, train, [*overrides, *sharding]):
        assert largest_difference(one["weights"], other["weights"]) < 1e-12
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-11)
        assert one["ledger"] == other["ledger"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_rounds_like_two_workers(pool: WorkerPool, precision: str) -> None:
    overrides = [*ADAMW, f"precision={precision}", "max_steps=4"]
    whole = pool.run(2, train, [*overrides, *BLOCKS])[0]
    sharded = pool.run(2, train, [*overrides, *FSDP])[0]
    assert largest_difference(whole["weights"], sharded["weights"]) < 1e-5


def test_weights_gathered_in_bf16_are_rounded(pool: WorkerPool) -> None:
    overrides = [*SGD, "precision=bf16", *FSDP]
    exact = pool.run(2, train, overrides)[0]
    rounded = pool.run(2, train, [*overrides, "sharding.param_dtype=bf16"])[0]
    assert 1e-6 < largest_difference(exact["weights"], rounded["weights"]) < 1e-2
    assert rounded["weights"].keys() == exact["weights"].keys()
    assert all(tensor.dtype == torch.float32 for tensor in rounded["weights"].values() if tensor.is_floating_point())
    assert rounded["stats"].bytes < exact["stats"].bytes


def test_one_worker_sends_and_rounds_nothing(pool: WorkerPool) -> None:
    one, rounded = (pool.run(1, train, [*SGD, *FSDP, *more])[0] for more in ([], ["sync.compress=bf16"]))
    assert largest_difference(one["weights"], rounded["weights"]) == 0
    assert rounded["stats"].bytes == 0


def test_running_statistics(pool: WorkerPool) -> None:
    """Of batch normalisation: averaged as without sharding."""
    overrides = [*SGD, *BATCH_NORM]
    whole, sharded = (pool.run(2, train, [*overrides, f"sharding={kind}"]) for kind in ("none", "fsdp"))
    assert largest_difference(whole[0]["weights"], sharded[0]["weights"]) < 1e-12
    assert largest_difference(sharded[1]["weights"], sharded[0]["weights"]) == 0


@pytest.mark.parametrize("sharding", [FSDP, OFFLOAD], ids=["fsdp", "offload"])
def test_a_resumed_run_ends_with_the_same_bits(pool: WorkerPool, sharding: list[str]) -> None:
    check(pool, [*ADAMW, *DROPOUT, "precision=fp32", *BEST, *sharding], (2, 5, 8))


def test_a_preempted_run_ends_with_the_same_bits(pool: WorkerPool) -> None:
    settings = [*ADAMW, *DROPOUT, "precision=fp32", *BEST, *FSDP]
    whole = pool.run(2, train_whole, settings)
    preempted = pool.run(2, train_preempted, settings, [("step", 1), ("evaluation", 2)])
    assert all(map(same, whole, preempted))


def test_others_continue_a_run(pool: WorkerPool, tmp_path: Path) -> None:
    """On another number of workers, whole and sharded in turn: the ledger and the weights of one worker."""
    overrides = [*ADAMW, *EXACT, *BLOCKS, "evaluation.every_steps=2", "evaluation.keep_best=true"]
    whole = pool.run(1, train_whole, overrides)[0]
    for workers, kind, until in ((2, "fsdp", 2), (3, "fsdp", 4), (1, "none", 5), (3, "fsdp", 7), (2, "none", None)):
        part = pool.run(workers, train_part, [*overrides, f"sharding={kind}"], tmp_path, until)[0]
    assert largest_difference(part["weights"], whole["weights"]) < 1e-12
    assert part["ledger"] == whole["ledger"]
    assert largest_difference(part["state"]["best"]["weights"], whole["state"]["best"]["weights"]) < 1e-12


def whole_model(backend: Backend, overrides: list[str]) -> Any:
    loop = make_loop(backend, overrides)
    loop.train(until=2)
    loop.finish()
    assert loop.replica.sharded is not None
    model = loop.replica.sharded.whole()
    shards = sum(parameter.to_local().numel() for parameter in loop.model.parameters())  # type: ignore[operator]
    weights = weights_of(loop)
    result = None if model is None else (type(model).__name__, dict(model.state_dict()))
    loop.policy.close()
    return weights, shards, result


@pytest.mark.parametrize(
    "precision", [[], ["precision=bf16", "sharding.param_dtype=bf16"]], ids=["fp64", "gathered in bf16"]
)
def test_each_worker_has_a_shard_and_rank_0_saves_the_whole(pool: WorkerPool, precision: list[str]) -> None:
    """Also what an evaluation has left gathered."""
    results = pool.run(3, whole_model, [*SGD, *FSDP, *precision])
    (weights, _, saved), *others = results
    name, tensors = saved
    assert not name.startswith("FSDP")
    assert same(tensors, weights)
    assert [other[2] for other in others] == [None, None]
    parts = [shards for _, shards, _ in results]
    assert sum(parts) == sum(tensor.numel() for tensor in weights.values())
    assert max(parts) < 0.4 * sum(parts)
