"""Batches in few shapes, for devices that compile: padding and fillers change no result, in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from runner.data.loader import FILLER
from tests.compiling import (
    Shape,
    optimizer_is_fused,
    train,
    train_in_two_parts,
    warnings_of_all,
    what_is_said_of_shapes,
)
from tests.pool import WorkerPool
from tests.sync.reference import largest_difference
from tests.token_recipe import TOKENS

SGD = ["optimizer=sgd", "optimizer.lr=0.05"]
ADAMW = ["optimizer=adamw", "optimizer.lr=1e-3"]
EXACT = ["equivalence=exact", "recipe.model.dropout=0.1", "recipe.model.attention_dropout=0.1"]
#: The rows to train on have 5 to 12 tokens, those to evaluate 10 at most: the last two buckets are beyond them.
BUCKETS = (8, 14, 32)
GIVEN = f"device.length_buckets=[{','.join(map(str, BUCKETS))}]"
#: Tokens of the longest row of the 100 to train on, and of the 30 to evaluate: one program each without buckets.
LONGEST = (12, 10)

Result = dict[str, Any]


def assert_same(found: list[Result], expected: list[Result], tolerance: float = 1e-12) -> None:
    """The same weights, metrics and ledger on every worker, and the same losses at every step."""
    for one, other in zip(found, expected, strict=True):
        assert largest_difference(one["weights"], other["weights"]) < tolerance
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-9)
        assert one["ledger"] == other["ledger"]
        assert [epoch["digest"] for epoch in one["ledger"]] == [epoch["digest"] for epoch in other["ledger"]]
        assert all(epoch["missing"] == epoch["duplicated"] == 0 for epoch in one["ledger"])
    losses = [[m["train/loss"] for _, m in r["logged"] if "train/loss" in m] for r in (found[0], expected[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert len(losses[0]) == 10


def bucketed(shapes: list[Shape], longest: int) -> list[Shape]:
    """What buckets make of these shapes of batches that are as long as their longest rows.

    `longest`: tokens of the longest row of the data at hand, beyond which nothing is padded.
    """
    lengths = (*(length for length in BUCKETS if length < longest), longest)
    return [(ids, (rows, min(length for length in lengths if length >= tokens))) for ids, (rows, tokens) in shapes]


def widths(shapes: list[Shape]) -> set[int]:
    return {shape[1] for _, shape in shapes}


def samples(shapes: list[Shape]) -> list[list[int]]:
    """The rows of each micro-batch without the fillers."""
    return [[row for row in ids if row != FILLER] for ids, _ in shapes]


# --- buckets on plain CPU workers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "accumulation", "k", "shape"),
    [(1, 4, 1, "gpt2"), (2, 2, 4, "bert")],
)
def test_length_buckets_change_padding_and_nothing_else(
    pool: WorkerPool, workers: int, accumulation: int, k: int, shape: str
) -> None:
    """Every micro-batch is padded to the first bucket it fits in, with the same rows; dropout is on and exact."""
    own = [f"recipe.model.shape={shape}", f"accumulation.steps={accumulation}", f"sync.k={k}"]
    overrides = [*SGD, *EXACT, *own, "evaluation.micro_batch=4"]
    without = pool.run(workers, train, overrides, False)
    with_buckets = pool.run(workers, train, [*overrides, GIVEN], False)
    assert_same(with_buckets, without)
    for one, other in zip(with_buckets, without, strict=True):
        assert one["trained"] == bucketed(other["trained"], LONGEST[0])
        assert one["evaluated"] == bucketed(other["evaluated"], LONGEST[1])
        assert widths(one["trained"]) <= {8, 12}
        assert widths(one["evaluated"]) <= {8, 10}
        assert widths(one["trained"]) != widths(other["trained"])


@pytest.mark.parametrize(
    ("workers", "setting"),
    [
        (1, "recipe.model.shape=bert"),
        (2, "recipe.model.shape=gpt2"),
        (2, "sharding=fsdp"),
        (1, "adapter=lora adapter.merge=true"),
    ],
)
def test_a_model_that_computes_no_padding(pool: WorkerPool, workers: int, setting: str) -> None:
    """It draws the same dropout, of a token wherever it is computed."""
    overrides = [*SGD, *EXACT, *setting.split(), "accumulation.steps=2", "recipe.model.layers=2"]
    results = [pool.run(workers, train, [*overrides, f"recipe.padding={how}"], False) for how in ("none", "longest")]
    assert_same(*results)


# --- a device that compiles -----------------------------------------------------------------------------------

#: Settings, how far apart the two devices may end, and on which (workers, accumulation, k) it is tried.
CASES: dict[str, tuple[list[str], float, list[tuple[int, int, int]]]] = {
    "exact dropout": ([*SGD, *EXACT], 1e-12, [(1, 3, 1), (2, 3, 4)]),
    "buckets": ([*SGD, *EXACT, "device.length_buckets=[6,8,10,14]"], 1e-12, [(2, 3, 4)]),
    "adamw": ([*ADAMW, *EXACT], 1e-9, [(2, 1, 1)]),
    # Of this corpus the shortest row, which fillers are made of, has a label to lose.
    "labels on tokens": (
        [*SGD, *TOKENS, "recipe.data.seed=4", "device.length_buckets=[9,14]"],
        1e-12,
        [(2, 3, 4)],
    ),
}


@pytest.mark.parametrize(
    ("name", "split"), [(name, split) for name, (*_, splits) in CASES.items() for split in splits], ids=str
)
def test_few_shapes_and_the_same_result(pool: WorkerPool, name: str, split: tuple[int, int, int]) -> None:
    """Fixed rows with fillers, buckets and the unfused optimizer end where the plain CPU does, tails included."""
    settings, tolerance, _ = CASES[name]
    workers, accumulation, k = split
    overrides = [*settings, f"accumulation.steps={accumulation}", f"sync.k={k}"]
    plain = pool.run(workers, train, [o for o in overrides if not o.startswith("device.length_buckets")], False)
    compiled = pool.run(workers, train, overrides, True)
    assert_same(compiled, plain, tolerance)
    buckets = [int(length) for o in settings if o.startswith("device.length_buckets") for length in o[23:-1].split(",")]
    for one, other in zip(compiled, plain, strict=True):
        # Rows of a micro-batch and of an evaluation.
        for part, rows in (("trained", 24 // workers // accumulation), ("evaluated", -(-30 // workers))):
            assert samples(one[part]) == samples(other[part])
            assert {shape[0] for _, shape in one[part]} == {rows}
            longest = max(widths(one[part]))
            assert widths(one[part]) <= {longest, *buckets}
            assert buckets or longest == LONGEST[part == "evaluated"]


def test_fillers_are_many(pool: WorkerPool) -> None:
    """The test above would prove little without fillers: the tail of 4 on 2 workers has 10 of them in each batch."""
    results = pool.run(2, train, [*SGD, "epochs=1"], True)
    assert [max(ids.count(FILLER) for ids, _ in result["trained"]) for result in results] == [10, 10]


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_fused_kernels_are_for_devices_that_compile_nothing(pool: WorkerPool, optimizer: list[str]) -> None:
    """The optimizer is torch's fused one on CPUs and GPUs, and the plain one where a program is made of it."""
    assert pool.run(1, optimizer_is_fused, optimizer, False) == [{True}]
    assert pool.run(1, optimizer_is_fused, optimizer, True) == [{False}]


@pytest.mark.parametrize(("k", "stop"), [(4, 5)])
def test_a_resumed_run_ends_with_the_same_weights(pool: WorkerPool, k: int, stop: int) -> None:
    """Batches sent ahead of their use are sent again after a stop, and none is lost: not one bit changes."""
    overrides = [*ADAMW, "recipe.model.dropout=0.1", "precision=fp32", f"sync.k={k}", "accumulation.steps=2"]
    whole = pool.run(2, train, overrides, True)
    for one, other in zip(whole, pool.run(2, train_in_two_parts, overrides, stop), strict=True):
        assert largest_difference(one["weights"], other["weights"]) == 0
        assert one["metrics"] == other["metrics"]
        assert one["ledger"] == other["ledger"]


def test_a_recipe_that_does_not_heed_the_length_is_told(pool: WorkerPool) -> None:
    """A collate that pads as it likes makes programs to the end, and is told so; one that heeds the length, one."""
    overrides = [*SGD, "batch.global_batch=4", "batch.drop_last=true", "epochs=1"]
    assert pool.run(1, what_is_said_of_shapes, overrides, False) == [(2, None)]  # of training and of the evaluation
    ((programs, said),) = pool.run(1, what_is_said_of_shapes, overrides, True)
    assert programs > 20
    assert said is not None
    assert said.startswith("10 compilations after the first 10 optimizer steps, the last in step 20, for input_ids [4,")


def test_warnings_of_all_workers(pool: WorkerPool) -> None:
    """Each worker gets the warnings of all workers, with their ranks; usually there are none."""
    said = [None, "batches, in tokens × rows", "x"]
    expected = ("worker 1: batches, in tokens × rows", "worker 2: x")
    assert pool.run(3, warnings_of_all, said) == [expected] * 3
    assert pool.run(2, warnings_of_all, [None, None]) == [(), ()]
    assert pool.run(1, warnings_of_all, ["x"]) == [("worker 0: x",)]


def test_periodic_averaging_communicates_as_ever(pool: WorkerPool) -> None:
    """Bytes and synchronisations are the plain CPU's; the seconds of gradients inside a program are not known."""
    for k in (1, 4):
        plain, compiled = (
            pool.run(2, train, [*SGD, f"sync.k={k}"], compiles)[0]["stats"] for compiles in (False, True)
        )
        assert (plain.synchronisations, plain.bytes) == (compiled.synchronisations, compiled.bytes)
        assert plain.seconds is not None
        assert (compiled.seconds is None) is (k == 1)


def test_unknown_seconds_are_not_logged(pool: WorkerPool) -> None:
    """Where the seconds of communication are not known the metric is left out, and what was compiled is there."""
    logged = pool.run(2, train, SGD, True)[0]["logged"]
    keys = {name for _, metrics in logged for name in metrics}
    assert {"comm/bytes", "compile/count", "compile/seconds"} <= keys
    assert "comm/seconds" not in keys
    assert all(value is not None for _, metrics in logged for value in metrics.values())
    plain = {name for _, metrics in pool.run(2, train, SGD, False)[0]["logged"] for name in metrics}
    assert "comm/seconds" in plain
    assert not [name for name in plain if name.startswith("compile/")]
