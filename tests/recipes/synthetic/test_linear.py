"""The one-layer model: the article's weights, and choices that the recipe makes for other groups."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.synthetic.linear import LinearLayer
from runner.backends import Backend
from runner.config.choices import BatchMode, OptimizerName, ScalingRule, ScheduleName
from runner.config.compose import compose, settings
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.plan.experiment import prepare
from runner.plan.order import permutation
from runner.train.build import build_loop
from runner.train.hooks import Hooks
from runner.train.job import Job
from tests.pool import WorkerPool

#: What the article prints for two devices, and for accumulation over two batches.
ARTICLE = [0.9472, 0.9440, 0.9527, 0.9687, 0.9570, 0.9343, 0.9411, 0.9186]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    return Prepared.load(LinearLayer().prepare(Cache(tmp_path / "cache"), LinearLayer().facts(Cache(tmp_path))))


def train(backend: Backend, overrides: list[str]) -> dict[str, Any]:
    """Train as one worker to the end; weights, metrics and every logged training loss."""
    workers = f"device.workers={backend.world_size}"
    config = settings(compose(["recipe=linear", "device=cpu", workers, "tracking=none", *overrides]))
    experiment = prepare(config)
    job = Job(config, experiment.facts, Path(), "cpu", 1, 1, experiment.plan, time.time())
    losses: list[float] = []
    hooks = Hooks(log=lambda _, metrics: losses.extend(v for k, v in metrics.items() if k == "train/loss"))
    loop = build_loop(job, backend, hooks)
    loop.train()
    loop.finish()
    (weights,) = (p.detach().clone() for p in loop.model.parameters())
    loop.policy.close()
    return {"weights": weights.flatten(), "metrics": loop.evaluator.metrics, "losses": losses}


def by_hand(batches_per_step: int, dtype: torch.dtype) -> tuple[Tensor, list[float]]:
    """The article's loop in plain torch, on batches of 4 rows: weights, and the mean of sums of each step."""
    torch.manual_seed(0)
    inputs = torch.rand(8, 8).to(dtype)
    model = nn.Linear(8, 1, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for epoch in range(2):
        batches = inputs[permutation(8, 0, epoch)].split(4)
        for first in range(0, 2, batches_per_step):
            step = batches[first : first + batches_per_step]
            loss = torch.stack([model(batch).sum() for batch in step]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return model.weight.detach().flatten(), losses


# --- the article's comparison -------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-7), ("fp64", 1e-15)])
def test_accumulation_and_two_workers_end_alike(pool: WorkerPool, precision: str, tolerance: float) -> None:
    """One worker over two micro-batches, and two workers over one each, print the article's weights.

    They differ by the last bit at most, as sums of the same 8 numbers in another order may.
    """
    one = pool.run(1, train, ["accumulation.steps=2", f"precision={precision}"])[0]
    two = pool.run(2, train, [f"precision={precision}"])
    weights, losses = by_hand(2, one["weights"].dtype)
    assert one["weights"].tolist() == pytest.approx(ARTICLE, abs=5e-5)
    for result in two:
        assert (result["weights"] - one["weights"]).abs().max() <= tolerance
        assert (result["weights"] - weights).abs().max() <= tolerance
        assert result["metrics"] == pytest.approx(one["metrics"], rel=1e-6)
    assert two[0]["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert losses == pytest.approx(one["losses"], rel=1e-6)


def test_without_accumulation_one_worker_ends_elsewhere(pool: WorkerPool) -> None:
    """Batches of 4 on one worker are twice the steps: the same samples seen, and other weights."""
    (one,) = pool.run(1, train, ["precision=fp64"])
    assert len(one["losses"]) == 4
    assert (one["weights"] - torch.tensor(ARTICLE)).abs().min() > 0.05
    weights, losses = by_hand(1, torch.float64)
    assert (one["weights"] - weights).abs().max() <= 1e-15
    assert one["losses"] == pytest.approx(losses, rel=1e-12)


def test_the_metric_is_the_loss(pool: WorkerPool, prepared: Prepared) -> None:
    """The evaluation part is the training part, and its loss the one that the next step would start with."""
    results = [
        pool.run(1, train, ["accumulation.steps=2", "precision=fp64", f"epochs={epochs}"])[0] for epochs in (1, 2)
    ]
    assert results[0]["metrics"]["loss"] == pytest.approx(results[1]["losses"][1], rel=1e-12)
    assert results[0]["losses"][0] > results[0]["metrics"]["loss"] > results[1]["metrics"]["loss"]
    rows = range(8)
    assert torch.equal(
        *(LinearLayer().collate(part[rows], prepared)["inputs"] for part in (prepared.train, prepared.eval))
    )


# --- data, model and loss -----------------------------------------------------------------------------------


def test_data_are_the_articles_bit_by_bit(prepared: Prepared, tmp_path: Path) -> None:
    """What comes out of a table of whole numbers is what `torch.rand` gave, and the global stream is not touched."""
    torch.manual_seed(0)
    LinearLayer().facts(Cache(tmp_path))
    inputs = LinearLayer().collate(prepared.train[range(8)], prepared)["inputs"]
    assert torch.equal(inputs, torch.rand(8, 8))
    facts = LinearLayer().facts(Cache(tmp_path))
    assert (facts.train_samples, facts.eval_samples) == (8, 8)
    assert prepared.train.column("label_count").tolist() == [1] * 8


def test_reduced_precision_is_summed_in_fp32(prepared: Prepared) -> None:
    """Under autocast the layer works in bf16, and its outputs are summed in fp32."""
    model = LinearLayer().build_model(prepared)
    batch = LinearLayer().collate(prepared.train[range(8)], prepared)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_sum, _ = LinearLayer().loss(model, batch)
        assert LinearLayer().predict(model, batch).dtype is torch.float32
    assert loss_sum.dtype is torch.float32
    assert float(loss_sum.detach()) == pytest.approx(4 * float(batch["inputs"].sum()), rel=1e-2)


# --- choices ------------------------------------------------------------------------------------------------


def test_the_recipe_chooses_for_other_groups() -> None:
    """`recipe=linear` alone is the article's experiment."""
    config = settings(compose(["recipe=linear"]))
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.momentum) == (OptimizerName.sgd, 0.01, 0.9)
    assert (optimizer.clip_norm, optimizer.weight_decay, optimizer.nesterov) == (None, 0.0, False)
    assert (config.schedule.name, config.schedule.warmup_share) == (ScheduleName.constant, 0.0)
    assert (config.scaling.rule, config.epochs) == (ScalingRule.none, 2)
    assert (config.batch.mode, config.batch.micro_batch) == (BatchMode.per_device, 4)
    assert settings(compose([])).optimizer.name is OptimizerName.adamw


@pytest.mark.parametrize("overrides", [["recipe=linear", "optimizer=adamw"], ["optimizer=adamw", "recipe=linear"]])
def test_the_command_line_wins(overrides: list[str]) -> None:
    """An optimizer that is asked for comes with its own settings; clipping stays off."""
    optimizer = settings(compose(overrides)).optimizer
    assert (optimizer.name, optimizer.betas, optimizer.eps) == (OptimizerName.adamw, [0.9, 0.999], 1e-8)
    assert (optimizer.lr, optimizer.clip_norm, optimizer.momentum) == (0.01, None, None)
    clipped = settings(compose([*overrides, "optimizer.clip_norm=1", "schedule=cosine", "scaling=sqrt"]))
    assert clipped.optimizer.clip_norm == 1
    assert (clipped.schedule.name, clipped.scaling.rule) == (ScheduleName.cosine, ScalingRule.sqrt)


def test_a_fixed_global_batch_can_be_asked_for() -> None:
    """`batch=fixed_global` wins as well, with the global batch that the recipe was tuned with."""
    batch = settings(compose(["recipe=linear", "batch=fixed_global"])).batch
    assert (batch.global_batch, batch.micro_batch) == (8, None)
    batch = settings(compose(["recipe=linear"])).batch
    assert (batch.global_batch, batch.micro_batch) == (None, 4)
