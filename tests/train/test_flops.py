"""Counting a model's operations: against the formula for transformers, and for models that are none."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from runner.backends import Backend
from runner.backends.machine import CoreWaits
from runner.config.choices import PrecisionName
from runner.plan.experiment import prepare
from runner.train.build import build_loop
from runner.train.flops import flops_per_sample, peak_flops_per_s
from runner.train.job import Job
from runner.train.sharding import full
from tests.configured import configured
from tests.pool import WorkerPool
from tests.replicas import make_loop

_MERGED = ["adapter=lora", "adapter.merge=true"]


def counted(backend: Backend, overrides: list[str]) -> float:
    loop = make_loop(backend, overrides)
    rows = np.arange(len(loop.replica.prepared.train))
    flops = flops_per_sample(loop.replica, rows)
    loop.policy.close()
    return flops


def by_formula(backend: Backend, overrides: list[str]) -> float:
    """6 per token and weight of a layer, 4 if it is frozen, and attention's 12 × layers × hidden × length²."""
    loop = make_loop(backend, overrides)
    lengths = np.asarray(loop.replica.prepared.train.column("length"))
    hidden = loop.model.config.hidden_size
    flops = 12 * loop.model.config.num_hidden_layers * hidden * float((lengths.astype(float) ** 2).mean())
    for name, module in loop.model.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        # PEFT trains a copy of the original head.
        is_used = not isinstance(module, nn.Embedding) and not name.endswith("original_module")
        if is_used and weight is not None and weight.dim() == 2:
            once = any(part in name for part in ("pooler", "classifier"))  # of the first token only
            factor = 6 if weight.requires_grad else 4
            flops += factor * full(weight).numel() * (1 if once else float(lengths.mean()))
    loop.policy.close()
    return flops


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["recipe.model.layers=2", "accumulation.steps=2"],
        ["precision=bf16"],
        ["gradient_checkpointing=true"],
        ["equivalence=exact"],
        [*_MERGED, "adapter.rank=4"],
    ],
)
def test_a_transformer_has_the_operations_of_the_formula(pool: WorkerPool, overrides: list[str]) -> None:
    assert pool.run(1, counted, overrides)[0] == pytest.approx(pool.run(1, by_formula, overrides)[0], rel=1e-6)


def test_padding_does_not_count(pool: WorkerPool) -> None:
    """Nor does the way in which the model is spread over workers."""
    plain = pool.run(1, counted, [])[0]
    assert pool.run(1, counted, ["++recipe.padding=max_length"])[0] == pytest.approx(plain)
    assert pool.run(2, counted, ["sharding=fsdp", "precision=fp32"]) == pytest.approx([plain, plain])


def test_a_linear_layer(pool: WorkerPool) -> None:
    """8 weights, each of which takes two operations forward and four backward."""
    linear = ["recipe=linear", "precision=fp32"]
    assert pool.run(1, linear_layer, linear)[0] == 6 * 8


def linear_layer(backend: Backend, overrides: list[str]) -> float:
    experiment = prepare(configured([*overrides, "device=cpu", "tracking=none"]))
    job = Job(experiment.config, experiment.facts, Path(), "cpu", 1, 1, experiment.plan, time.time())
    return flops_per_sample(build_loop(job, backend).replica, np.arange(8))


def peak(backend: Backend, name: str, waited_share: float | None) -> float | None:
    from runner.train.precision import Precision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoreWaits, "share", lambda _: waited_share)
        return peak_flops_per_s(backend, Precision(PrecisionName[name], "cpu"), 2)


@pytest.mark.parametrize("waited_share", [0.1, None])
def test_one_worker_of_a_machine_measures_its_peak(waited_share: float | None, pool: WorkerPool) -> None:
    first, *others = pool.run(2, peak, "fp32", waited_share)
    assert first is not None
    assert 1e8 < first < 1e15
    assert others == [0]


def test_a_peak_of_a_busy_machine_is_not_known(pool: WorkerPool) -> None:
    assert pool.run(2, peak, "fp32", 0.5) == [None, 0]
