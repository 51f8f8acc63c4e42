"""Whole runs of the causal language model: token counts that differ from worker to worker, the cache, the command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.synthetic.acceptability import GrammarCorpus
from runner import cli
from runner.backends import Backend
from runner.config.compose import compose, settings
from runner.data.cache import Cache
from runner.data.recipe import Prepared, label_counts
from runner.plan.experiment import Experiment, prepare
from runner.plan.order import permutation
from runner.train.build import Job, build_loop
from tests.pool import WorkerPool
from tests.recipes.letters import perplexity_by_hand, save_gpt2, uneven_lines

ROOT = Path(__file__).parents[2]
GLOBAL_BATCH = 12

#: No clipping, which would hide a wrong scale; rows dealt as drawn, since sorting by length would even out the counts.
SGD = [
    *("recipe.packing=documents", "recipe.block_size=32", f"batch.global_batch={GLOBAL_BATCH}", "epochs=2"),
    *("batch.length_sorted=false", "precision=fp64", "optimizer=sgd", "optimizer.lr=0.05", "optimizer.clip_norm=null"),
    *("schedule=constant", "scaling=none", "tracking=none", "device=cpu"),
]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A hundred lines of 2 to 61 tokens and a tiny model that has seen none of them."""
    folder = tmp_path_factory.mktemp("uneven")
    for part, count, seed in (("train", 100, 1), ("eval", 10, 2)):
        (folder / f"{part}.txt").write_text("\n".join(uneven_lines(count, seed)))
    files = [f"recipe.data.{part}={folder / part}.txt" for part in ("train", "eval")]
    return ["recipe=causal_lm", *files, f"recipe.model.name={save_gpt2(folder / 'model')}", *SGD]


def experiment_of(overrides: list[str]) -> Experiment:
    return prepare(settings(compose(overrides)))


def data_of(experiment: Experiment) -> Prepared:
    return Prepared.load(experiment.recipe.prepare(Cache(experiment.config.cache_dir), experiment.facts))


def train(backend: Backend, overrides: list[str]) -> dict[str, Any]:
    """Train as one worker to the end; weights, metrics and every logged training loss."""
    experiment = experiment_of([*overrides, f"device.workers={backend.world_size}"])
    workers = backend.world_size
    job = Job(experiment.config, experiment.plan, experiment.facts, Path(), "cpu", workers, 1, time.time())
    losses: list[float] = []
    loop = build_loop(
        job, backend, lambda _, metrics: losses.extend(v for k, v in metrics.items() if k == "train/loss")
    )
    loop.train()
    loop.finish()
    weights = {name: tensor.detach().clone() for name, tensor in loop.model.state_dict().items()}
    loop.policy.close()
    return {"weights": weights, "metrics": loop.eval_metrics, "losses": losses}


@pytest.fixture(scope="module")
def one_worker(pool: WorkerPool, uneven: list[str]) -> dict[str, Any]:
    return pool.run(1, train, uneven)[0]


# --- token counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "accumulation"), [(2, 1), (2, 3), (4, 1)])
def test_workers_with_uneven_token_counts(
    pool: WorkerPool, uneven: list[str], one_worker: dict[str, Any], workers: int, accumulation: int
) -> None:
    """With k = 1 weights, losses and perplexity are one worker's, though one worker's rows have far more targets."""
    for result in pool.run(workers, train, [*uneven, f"accumulation.steps={accumulation}"]):
        assert result["weights"].keys() == one_worker["weights"].keys()
        for name, tensor in result["weights"].items():
            assert float((tensor - one_worker["weights"][name]).abs().max()) < 1e-12, name
        assert result["metrics"] == pytest.approx(one_worker["metrics"], rel=1e-9)
    assert len(one_worker["losses"]) == experiment_of(uneven).plan.optimizer_steps > 10


def test_token_counts_are_uneven(uneven: list[str]) -> None:
    """The test above would prove little if two workers' shares had about as many targets."""
    experiment = experiment_of(uneven)
    counts = label_counts(data_of(experiment).train)
    order = permutation(len(counts), experiment.config.seed, 0)
    shares = [order[i : i + GLOBAL_BATCH] for i in range(0, len(order), GLOBAL_BATCH)]
    ratios = [float(counts[ids[0::2]].sum() / counts[ids[1::2]].sum()) for ids in shares]
    assert max(*ratios, *(1 / ratio for ratio in ratios)) > 2
    assert np.mean([max(ratio, 1 / ratio) for ratio in ratios]) > 1.25


def test_logged_losses_and_perplexity_by_hand(uneven: list[str], one_worker: dict[str, Any]) -> None:
    """The first loss is the mean over the first global batch's targets, the perplexity that of the last weights."""
    experiment = experiment_of(uneven)
    data = data_of(experiment)
    model = experiment.recipe.build_model(data).double().eval()
    first = permutation(len(data.train), experiment.config.seed, 0)[:GLOBAL_BATCH].tolist()
    total, count = 0.0, 0
    for row in first:
        ids = torch.tensor(np.asarray(data.train[[row]]["input_ids"][0], dtype=np.int64))
        with torch.no_grad():
            predicted = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        total -= float(predicted.gather(1, ids[1:, None]).sum())
        count += len(ids) - 1
    assert one_worker["losses"][0] == pytest.approx(total / count, rel=1e-10)
    model.load_state_dict(one_worker["weights"])
    assert one_worker["metrics"]["perplexity"] == pytest.approx(perplexity_by_hand(model, data.eval), rel=1e-9)


# --- the cache ----------------------------------------------------------------------------------------------

FACTS = """
import sys
from recipes.tasks.language_model import CausalLanguageModel
from recipes.sources.plain_text import PlainText
from recipes.models.pretrained import Pretrained
from runner.data.cache import Cache

train, evaluation, model, cache = sys.argv[1:]
facts = CausalLanguageModel(PlainText(train, evaluation), Pretrained(model), 16).facts(Cache(cache))
print(facts.train_samples, facts.eval_samples, facts.digest)
print("transformers" in sys.modules or "tokenizers" in sys.modules)
"""


def test_known_facts_need_no_tokenizer(uneven: list[str], tmp_path: Path) -> None:
    """Facts that are in the cache already cost no import of transformers; before they are, they do."""
    paths = [override.partition("=")[2] for override in uneven[1:4]]
    command = [sys.executable, "-c", FACTS, *paths, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    cold, warm = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert cold[0] == warm[0]
    assert (cold[1], warm[1]) == ("True", "False")


# --- the command --------------------------------------------------------------------------------------------


def test_a_run_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m runner recipe=causal_lm` on a few hundred sentences: perplexity falls, and what is saved has it."""
    monkeypatch.chdir(tmp_path)
    corpus = GrammarCorpus(0, 400, 30).read()
    words = sorted({word for text in (*corpus.train.texts, *corpus.eval.texts) for word in text.split()})
    (tmp_path / "train-1.txt").write_text("\n".join(corpus.train.texts[:200]))
    (tmp_path / "train-2.txt").write_text("\n".join(corpus.train.texts[200:]))
    (tmp_path / "eval.txt").write_text("\n".join(corpus.eval.texts))
    model = save_gpt2(tmp_path / "model", words, positions=64, width=32)
    options = ["recipe=causal_lm", "recipe.data.train=train-*.txt", "recipe.data.eval=eval.txt", "epochs=4"]
    options += [f"recipe.model.name={model}", "recipe.block_size=64", "optimizer.lr=5e-3", "tracking=none"]
    assert cli.main([*options, "device=cpu2"], time.time()) == 0
    (folder,) = (tmp_path / "outputs" / "causal_lm").iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["value"] for line in lines if line["key"] == "eval/perplexity"]
    summary, ledger = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "ledger"))
    assert len(found) == 4
    assert found == sorted(found, reverse=True)
    experiment = experiment_of([*options, "device=cpu2"])
    data = data_of(experiment)
    before, after = (
        perplexity_by_hand(AutoModelForCausalLM.from_pretrained(place).eval(), data.eval)
        for place in (model, folder / "model")
    )
    assert summary["eval"]["perplexity"] == pytest.approx(after, rel=1e-4)
    assert summary["eval"]["loss"] == pytest.approx(math.log(after), rel=1e-4)
    assert after < before / 3
    assert summary["samples_seen"] == 4 * experiment.facts.train_samples
    assert all(epoch["missing"] == epoch["duplicated"] == 0 for epoch in ledger["epochs"])
