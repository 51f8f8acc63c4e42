"""Exact dropout in models: with dropout on, training does not depend on how batches are split."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recipes.synthetic.acceptability import GrammarCorpus, SmallTransformer
from recipes.tasks.classification import SequenceClassification
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.exact import exact_streams
from tests.exact.draws import CPU
from tests.pool import WorkerPool
from tests.replicas import Weights, train
from tests.resumed import train_in_parts
from tests.sync.reference import EXACT, SGD, largest_difference


def recipe(shape: str, dropout: float = 0.2) -> SequenceClassification:
    sizes = {"hidden_size": 16, "feed_forward_size": 24, "layers": 2, "heads": 2, "initializer_range": 0.3}
    model = SmallTransformer(**sizes, dropout=dropout, attention_dropout=dropout, shape=shape)
    return SequenceClassification(GrammarCorpus(0, 60, 10), model, max_length=32)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder: Path = tmp_path_factory.mktemp("exact")
    return Prepared.load(recipe("bert").prepare(Cache(folder), recipe("bert").facts(Cache(folder))))


class Replica:
    """A model in training mode that runs micro-batches."""

    def __init__(self, prepared: Prepared, shape: str, attention: str = "sdpa", dropout: float = 0.2) -> None:
        self._prepared, self._recipe = prepared, recipe(shape, dropout)
        torch.manual_seed(0)
        self._model = self._recipe.build_model(prepared).double().train()
        self._model.set_attn_implementation(attention)

    def run(self, micro_batches: list[list[int]], seed: int = 0, step: int = 0) -> tuple[dict[int, Tensor], Weights]:
        """Logits by sample, and the gradient of the loss summed over all micro-batches."""
        streams, logits = exact_streams(seed), {}
        self._model.zero_grad()
        for ids in micro_batches:
            batch = self._recipe.collate(self._prepared.train[ids], self._prepared)
            with streams(step, np.array(ids), CPU):
                output = self._recipe.predict(self._model, batch)
            functional.cross_entropy(output, batch["labels"], reduction="sum").backward()
            logits.update(zip(ids, output.detach(), strict=True))
        gradients = {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}
        return logits, gradients


IDS = [3, 14, 15, 9, 26, 53]
SPLITS = [[6], [3, 3], [1] * 6, [1, 5], [2, 1, 3]]


@pytest.mark.parametrize("shape", ["bert", "gpt2"])
@pytest.mark.parametrize("order", [IDS, [53, 3, 26, 14, 9, 15]], ids=["drawn", "mixed"])
def test_logits_and_gradients_do_not_depend_on_the_split(prepared: Prepared, shape: str, order: list[int]) -> None:
    """In fp64 with dropout 0.2 everywhere, and with transformers' fused and unfused attention."""
    assert len({int(prepared.train.column("length")[row]) for row in IDS}) >= 4  # so that splits differ in padding
    logits, gradients = Replica(prepared, shape).run([IDS])
    for attention in ("sdpa", "eager"):
        replica = Replica(prepared, shape, attention)
        for sizes in SPLITS:
            ends = list(itertools.accumulate(sizes))
            found = replica.run([order[end - size : end] for size, end in zip(sizes, ends, strict=True)])
            assert largest_difference(found[0], logits) < 1e-12
            assert largest_difference(found[1], gradients) < 1e-12


@pytest.mark.parametrize("shape", ["bert", "gpt2"])
def test_masks_depend_on_seed_step_and_sample(prepared: Prepared, shape: str) -> None:
    replica = Replica(prepared, shape)
    logits, _ = replica.run([IDS])
    without, _ = Replica(prepared, shape, dropout=0.0).run([IDS])
    for found in (replica.run([IDS], seed=1)[0], replica.run([IDS], step=1)[0], without):
        assert all((found[row] - logits[row]).abs().max() > 1e-4 for row in IDS)
    same_text = replica._recipe.collate(prepared.train[IDS[:1]], prepared)
    by_id = []
    for row in (3, 4, 3):
        with torch.no_grad(), exact_streams(0)(0, np.array([row]), CPU):
            by_id.append(replica._recipe.predict(replica._model, same_text))
    assert torch.equal(by_id[0], by_id[2])
    assert (by_id[0] - by_id[1]).abs().max() > 1e-4


# The loop; tests/train/test_loop.py has the splits.


@pytest.fixture(scope="module")
def one_worker(pool: WorkerPool) -> Weights:
    weights: Weights = pool.run(1, train, [*SGD, *EXACT])[0]["weights"]
    return weights


@pytest.mark.parametrize(
    ("workers", "other"), [(2, "equivalence=standard"), (1, "seed=1"), (1, "recipe.model.attention_dropout=0")]
)
def test_other_dropout_ends_elsewhere(pool: WorkerPool, one_worker: Weights, workers: int, other: str) -> None:
    found = pool.run(workers, train, [*SGD, *EXACT, other])[0]["weights"]
    assert largest_difference(found, one_worker) > 1e-4


@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_has_the_same_masks(pool: WorkerPool, one_worker: Weights, stop: int) -> None:
    """Stopped within an epoch or at its end; two workers end with the weights of one."""
    for result in pool.run(2, train_in_parts, [*SGD, *EXACT], [stop]):
        assert largest_difference(result["weights"], one_worker) < 1e-12
