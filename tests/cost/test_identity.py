"""What the time of a step depends on, whoever asks."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from runner.cost.identity import step_settings
from runner.plan.experiment import prepare
from tests.configured import configured
from tests.replicas import TINY

SETTINGS = [override for override in TINY if not override.startswith("precision")]


@functools.cache
def found(*overrides: str) -> dict[str, Any]:
    return step_settings(prepare(configured([*SETTINGS, *overrides])).setup)


@pytest.mark.parametrize(
    "overrides",
    [
        ["seed=3", "epochs=1", "max_steps=2", "optimizer.lr=0.1", "schedule=cosine"],
        ["evaluation.every_steps=2", "evaluation.micro_batch=3", "evaluation.keep_best=true"],
        ["ledger=warn", "cache_dir=elsewhere", "log_every=1", "recipe.tuned.lr=0.1"],
        ["batch.global_batch=48", "accumulation.steps=2", "device.workers=2", "sync.k=4"],
    ],
)
def test_what_has_no_part_in_it(overrides: list[str]) -> None:
    assert found(*overrides) == found()


@pytest.mark.parametrize(
    "override",
    [
        *("recipe.model.layers=2", "++recipe.padding=max_length", "precision=bf16"),
        *("optimizer=sgd", "optimizer.clip_norm=null", "gradient_checkpointing=true", "equivalence=exact"),
        *("adapter=lora", "compile=true"),
    ],
)
def test_what_has_a_part_in_it(override: str) -> None:
    assert found(override) != found()
