"""`equivalence=identical`: the same bits on any number of workers, and mistakes that give other ones."""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from runner.backends import Backend
from runner.exact import exact_streams
from runner.train.build import build_loop
from runner.train.hooks import Hooks, Training
from runner.train.identical import weights_digest
from runner.train.loop import Loop
from tests.pool import WorkerPool
from tests.replicas import make_loop, refusal, tiny_job
from tests.resumed import train_part
from tests.sync.reference import ADAMW, SGD
from tests.token_recipe import TOKENS

DROPOUT = ["recipe.model.dropout=0.1", "recipe.model.attention_dropout=0.1"]
IDENTICAL = ["equivalence=identical", *DROPOUT, "schedule.warmup_share=0"]
#: Wide enough for kernels that cut their work into as many pieces as there are threads.
WIDE = ["recipe.model.hidden_size=128", "recipe.model.feed_forward_size=512", "precision=fp32", *ADAMW]


class _Digests:
    """Takes the digest of all weights after every step."""

    def __init__(self) -> None:
        self.of_steps: list[str] = []

    def after_step(self, training: Training) -> None:
        self.of_steps.append(weights_digest(dict(training.replica.model.named_parameters())))


def bits(backend: Backend, overrides: list[str], fault: str | None = None) -> dict[str, Any]:
    """The digest of all weights after every step, and whatever else must be the same."""
    logged: list[Any] = []
    digests = _Digests()
    hooks = Hooks(log=lambda step, metrics: logged.append((step, metrics)), after_step=[digests])
    with mock.patch("runner.sync.tree_sum._BUCKET_BYTES", 2_000):  # several of so small a model
        loop = build_loop(tiny_job(overrides, backend.world_size), backend, hooks)
    assert backend.world_size == 1 or len(loop.policy._buckets) > 2
    with FAULTS[fault](loop, backend) if fault else nullcontext():
        loop.train()
        loop.finish()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert threads == (2 if fault == "another number of threads" else 1)
    return {
        "weights": digests.of_steps,
        "losses": [metrics["train/loss"] for _, metrics in logged if "train/loss" in metrics],
        "metrics": loop.evaluator.metrics,
        "ledger": hashlib.sha256("".join(record.digest for record in loop.ledger.epochs).encode()).hexdigest(),
        "moments": [weights_digest(state) for state in loop.replica.optimizer.state.values()],
    }


@pytest.mark.parametrize(("precision", "optimizer", "world_sizes"), [("fp32", ADAMW, (3, 8)), ("bf16", SGD, (2, 7))])
def test_any_number_of_workers_has_the_same_bits(
    pool: WorkerPool, precision: str, optimizer: list[str], world_sizes: tuple[int, ...]
) -> None:
    """Uneven shares, and a tail of 4 samples, in which 4 of 8 workers have none."""
    overrides = [*IDENTICAL, f"precision={precision}", *optimizer]
    (alone,) = pool.run(1, bits, overrides)
    assert len(set(alone["weights"])) == len(alone["losses"]) == 10
    for workers in world_sizes:
        check(pool, alone, workers, overrides)


@pytest.mark.long
@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", ADAMW), ("bf16", SGD), ("fp64", ADAMW)])
def test_one_to_eight_workers(pool: WorkerPool, precision: str, optimizer: list[str]) -> None:
    """As many micro-batches per worker as are asked for, or more."""
    overrides = [*IDENTICAL, f"precision={precision}", *optimizer]
    (alone,) = pool.run(1, bits, overrides)
    for workers in range(2, 9):
        for steps in {1, 8 // workers}:
            check(pool, alone, workers, [*overrides, f"accumulation.steps={steps}"])


def check(pool: WorkerPool, alone: dict[str, Any], workers: int, overrides: list[str]) -> None:
    first, *others = pool.run(workers, bits, overrides)
    assert first == alone, workers
    same = ("weights", "moments", "metrics", "ledger")  # losses are logged by rank 0
    assert [[one[name] for name in same] for one in others] == [[alone[name] for name in same]] * (workers - 1)


@pytest.mark.parametrize(
    "overrides",
    [
        [*TOKENS, *ADAMW, "precision=fp32"],  # uneven counts, and shards without a label
        ["precision=fp16", *SGD],  # with its loss scaler
        ["recipe.model.shape=gpt2", "precision=bf16", *ADAMW],
        ["equivalence.shards=5", "precision=fp32", *ADAMW],  # no power of two
        ["equivalence.shards=24", "precision=fp32", *ADAMW],  # one sample each
        ["batch.global_batch=200", "precision=fp32", *ADAMW],  # more than there are
        ["recipe.padding=none", "batch.length_sorted=true", "precision=fp32", *ADAMW],
        ["adapter=lora", "adapter.merge=true", "precision=fp32", *ADAMW],
        ["adapter=qlora", "adapter.merge=true", "precision=bf16", *ADAMW],
        ["optimizer=adafactor", "precision=fp32"],
        ["optimizer=muon", "precision=fp32"],
        ["evaluation.every_steps=2", "evaluation.keep_best=true", "evaluation.patience=2", "precision=bf16", *ADAMW],
    ],
    ids=lambda overrides: overrides[0],
)
def test_other_losses_shards_and_weights(pool: WorkerPool, overrides: list[str]) -> None:
    (alone,) = pool.run(1, bits, [*IDENTICAL, *overrides])
    check(pool, alone, 3, [*IDENTICAL, *overrides])


def test_micro_batches_are_the_shards(pool: WorkerPool) -> None:
    """As many or fewer may be asked for."""
    overrides = [*IDENTICAL, *ADAMW, "precision=fp32"]
    (alone,) = pool.run(1, bits, overrides)
    for workers, limit in ((1, "accumulation.steps=8"), (2, "accumulation.steps=3")):
        check(pool, alone, workers, [*overrides, limit])
    check(pool, alone, 2, [*overrides, "accumulation=auto", "accumulation.max_micro_batch=3"])


# --- what must not go unnoticed --------------------------------------------------------------------------------


def _swapped_shards(loop: Loop, backend: Backend) -> AbstractContextManager[Any]:
    right = loop.order.micro_batches

    def swapped(epoch: int, step: Any) -> list[np.ndarray]:
        dealt = right(epoch, step)
        return [dealt[2], dealt[1], dealt[0], *dealt[3:]] if len(dealt) > 2 else dealt

    return mock.patch.object(loop.order, "micro_batches", swapped)


def _another_tree(loop: Loop, backend: Backend) -> AbstractContextManager[Any]:
    """From left to right."""
    return mock.patch("runner.plan.shards._are_halves", return_value=True)


def _another_number_of_threads(loop: Loop, backend: Backend) -> AbstractContextManager[Any]:
    torch.set_num_threads(2)
    return nullcontext()


def _a_shifted_dropout_stream(loop: Loop, backend: Backend) -> AbstractContextManager[Any]:
    right = exact_streams(loop.replica.config.seed)
    last = loop.optimizer_step + 3
    return mock.patch.object(loop.step, "_dropout", lambda step, ids, device: right(step + (step == last), ids, device))


FAULTS = {
    "swapped shards": _swapped_shards,
    "another tree": _another_tree,
    "another number of threads": _another_number_of_threads,
    "a shifted dropout stream": _a_shifted_dropout_stream,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_arithmetic_has_other_bits(pool: WorkerPool, fault: str) -> None:
    overrides = [*IDENTICAL, *WIDE]
    (right,) = pool.run(1, bits, overrides)
    (wrong,) = pool.run(1, bits, overrides, fault)
    step = 3 if fault == "a shifted dropout stream" else 0
    assert wrong["weights"][:step] == right["weights"][:step]
    assert wrong["weights"][step] != right["weights"][step]


# --- stopped and resumed, and refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(3, 7), (5, 8)], ids=str)
def test_a_run_that_moves_between_workers_has_the_same_bits(
    pool: WorkerPool, tmp_path: Path, stops: tuple[int, int]
) -> None:
    overrides = [*IDENTICAL, *ADAMW, "precision=fp32"]
    (whole,) = pool.run(1, train_part, overrides, tmp_path / "whole", None)
    for workers, until in zip((2, 5, 3), (*stops, None), strict=True):
        parts = pool.run(workers, train_part, overrides, tmp_path / "parts", until)
    assert weights_digest(parts[0]["weights"]) == weights_digest(whole["weights"])
    assert parts[0]["metrics"] == whole["metrics"]
    assert parts[0]["ledger"] == whole["ledger"]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_shard_needs_every_gradient(pool: WorkerPool, workers: int) -> None:
    half_used = ["recipe._target_=tests.odd_recipe.HalfUsed", "trusted_packages=[recipes,tests]"]
    for message in pool.run(workers, refusal, ["equivalence=identical", *half_used]):
        assert "unread.weight" in message
        assert "equivalence=exact" in message


def test_a_buffer_that_changes_is_refused(pool: WorkerPool) -> None:
    """Each worker would have its own."""
    counted = ["recipe._target_=tests.odd_recipe.CountedRows", "trusted_packages=[recipes,tests]"]
    for message in pool.run(2, refusal, ["equivalence=identical", *counted]):
        assert "rows_seen" in message
    assert pool.run(1, refusal, ["equivalence=exact", *counted]) == [""]


def predictions(backend: Backend, overrides: list[str]) -> list[list[float]]:
    """Of 30 rows, as they are evaluated in batches of 7."""
    loop = make_loop(backend, overrides)
    config = loop.replica.config
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, micro_batch=7))
    values = dataclasses.replace(loop.replica.predictor, config=config).predict(loop.replica.prepared)
    assert values is not None
    return values.tolist()  # type: ignore[no-any-return]


def test_evaluation_has_the_same_bits(pool: WorkerPool) -> None:
    overrides = [*IDENTICAL, *WIDE]
    (alone,) = pool.run(1, predictions, overrides)
    assert len(alone) == 30
    for workers in (2, 3, 8):
        assert pool.run(workers, predictions, overrides)[0] == alone
    assert pool.run(3, predictions, ["equivalence=exact", *overrides[1:]])[0] != alone


def test_other_weights_at_the_start_are_refused(pool: WorkerPool) -> None:
    """DDP would overwrite them."""
    other = ["recipe._target_=tests.odd_recipe.OtherOnEachWorker", "trusted_packages=[recipes,tests]"]
    for message in pool.run(2, refusal, ["equivalence=identical", *other]):
        assert "worker 1 has other weights" in message
