"""Exact dropout in models: training that does not depend on the split although dropout is on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

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
from tests.replicas import Weights, train, train_in_two_parts


def recipe(shape: str, dropout: float = 0.2) -> SequenceClassification:
    sizes = {"hidden_size": 16, "feed_forward_size": 24, "layers": 2, "heads": 2, "initializer_range": 0.3}
    model = SmallTransformer(**sizes, dropout=dropout, attention_dropout=dropout, shape=shape)
    return SequenceClassification(GrammarCorpus(0, 60, 10), model, max_length=32)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder: Path = tmp_path_factory.mktemp("exact")
    return Prepared.load(recipe("bert").prepare(Cache(folder), recipe("bert").facts(Cache(folder))))


class Replica:
    """A model in training, and what it makes of micro-batches."""

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


def largest_difference(a: dict[Any, Tensor], b: dict[Any, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


IDS = [3, 14, 15, 9, 26, 53]
SPLITS = [[3, 3], [2, 2, 2], [1] * 6, [4, 2], [1, 5], [2, 1, 3]]
SHAPES_OF_MODELS = ["bert", "gpt2"]


def test_splits_differ_in_padding(prepared: Prepared) -> None:
    """The next test would prove little if all six sentences were of one length."""
    lengths = [int(prepared.train.column("length")[row]) for row in IDS]
    assert len(set(lengths)) >= 4


@pytest.mark.parametrize("shape", SHAPES_OF_MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("order", [IDS, IDS[::-1], [53, 3, 26, 14, 9, 15]], ids=["drawn", "reversed", "mixed"])
def test_logits_and_gradients_do_not_depend_on_the_split(
    prepared: Prepared, shape: str, attention: str, order: list[int]
) -> None:
    """A batch of six gives in fp64 what any cut of it into micro-batches gives, with dropout 0.2 everywhere."""
    replica = Replica(prepared, shape, attention)
    logits, gradients = replica.run([IDS])
    for sizes in ([6], *SPLITS):
        ends = list(itertools.accumulate(sizes))
        cut = [order[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        found = replica.run(cut)
        assert largest_difference(found[0], logits) < 1e-12
        assert largest_difference(found[1], gradients) < 1e-12


@pytest.mark.parametrize("shape", SHAPES_OF_MODELS)
def test_fused_and_written_out_attention_have_the_same_masks(prepared: Prepared, shape: str) -> None:
    """transformers' two ways to compute attention come to the same under exact dropout."""
    logits, gradients = Replica(prepared, shape, "eager").run([IDS])
    found = Replica(prepared, shape, "sdpa").run([IDS[:2], IDS[2:]])
    assert largest_difference(found[0], logits) < 1e-12
    assert largest_difference(found[1], gradients) < 1e-12


@pytest.mark.parametrize("shape", SHAPES_OF_MODELS)
@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}])
def test_another_seed_or_step_drops_others(prepared: Prepared, shape: str, other: dict[str, int]) -> None:
    """Each sample's logits are others with another seed, in another step, and without dropout."""
    replica = Replica(prepared, shape)
    logits, _ = replica.run([IDS])
    without, _ = Replica(prepared, shape, dropout=0.0).run([IDS])
    for found in (replica.run([IDS], **other)[0], without):
        assert all((found[row] - logits[row]).abs().max() > 1e-4 for row in IDS)


@pytest.mark.parametrize("shape", SHAPES_OF_MODELS)
def test_another_sample_drops_others(prepared: Prepared, shape: str) -> None:
    """The same sentence under another id is dropped otherwise."""
    replica = Replica(prepared, shape)
    of = replica._recipe.collate(prepared.train[IDS[:1]], prepared)
    found = []
    for row in (3, 4, 3):
        with torch.no_grad(), exact_streams(0)(0, np.array([row]), CPU):
            found.append(replica._recipe.predict(replica._model, of))
    assert torch.equal(found[0], found[2])
    assert (found[0] - found[1]).abs().max() > 1e-4


# --- the loop; that splits end alike is in tests/test_loop.py --------------------------------------------------

EXACT = [
    "equivalence=exact",
    "recipe.model.dropout=0.2",
    "recipe.model.attention_dropout=0.2",
    "optimizer=sgd",
    "optimizer.lr=0.05",
]


@pytest.fixture(scope="module")
def one_worker(pool: WorkerPool) -> Weights:
    weights: Weights = pool.run(1, train, EXACT)[0]["weights"]
    return weights


@pytest.mark.parametrize(
    ("workers", "other"),
    [
        (1, ["equivalence=standard"]),
        (2, ["equivalence=standard"]),
        (1, ["seed=1"]),
        (1, ["recipe.model.dropout=0", "recipe.model.attention_dropout=0"]),
        (1, ["recipe.model.attention_dropout=0"]),
    ],
    ids=str,
)
def test_other_dropout_ends_elsewhere(pool: WorkerPool, one_worker: Weights, workers: int, other: list[str]) -> None:
    """Splits that end alike would prove little if the dropout did: another kind, seed or share ends elsewhere."""
    found = pool.run(workers, train, [*EXACT, *other])[0]["weights"]
    assert largest_difference(found, one_worker) > 1e-4


@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_goes_on_with_the_same_masks(pool: WorkerPool, one_worker: Weights, stop: int) -> None:
    """Stopping within an epoch or at its end, and starting anew, on two workers, ends with the weights of one."""
    for result in pool.run(2, train_in_two_parts, EXACT, stop):
        assert largest_difference(result["weights"], one_worker) < 1e-12
