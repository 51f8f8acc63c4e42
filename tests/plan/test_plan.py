"""The plan as a whole: derived numbers, invalid sizes, its digest, and what it does not import."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.config.choices import OptimizerName, ScalingBatch, ScalingRule
from runner.config.schema import Optimizer, Scaling
from runner.errors import UserError
from runner.plan import Plan, make_plan

ROOT = Path(__file__).resolve().parents[2]


OPTIMIZER = Optimizer(OptimizerName.adamw, lr=1e-3, weight_decay=0.01, betas=[0.9, 0.999], eps=1e-8)
OF_REPLICAS = Scaling(ScalingRule.linear, ScalingBatch.replica_batch, reference_batch=48)


def plan(**changes: Any) -> Plan:
    """A plan of 1,000 samples on four workers, with changes."""
    settings: dict[str, Any] = {
        "samples_per_epoch": 1000,
        "world_size": 4,
        "global_batch": 96,
        "micro_batch": None,
        "accumulation_steps": 2,
        "max_micro_batch": None,
        "drop_last": False,
        "local_steps": False,
        "k": 3,
        "optimizer": OPTIMIZER,
        "scaling": Scaling(ScalingRule.linear, reference_batch=48),
        "epochs": 2,
        "max_steps": None,
        "warmup_share": 0.1,
    }
    return make_plan(**{**settings, **changes})


def test_plan_by_hand() -> None:
    """Every derived number of one setup, calculated by hand; also the keys of plan.json."""
    # 1000 = 10 × 96 + 40: 11 steps an epoch, the last of 40 samples. Warm-up: 10% of 2000 samples are 200, and the
    # steps that begin below it are those at 0, 96 and 192.
    assert plan().as_json() == {
        "world_size": 4,
        "micro_batch": 12,
        "accumulation_steps": 2,
        "replica_batch": 24,
        "global_batch": 96,
        "k": 3,
        "sync_window": 288,
        "reference_batch": 48,
        "base_lr": 1e-3,
        "lr_factor": 2.0,
        "lr": 2e-3,
        "samples_per_epoch": 1000,
        "epochs": 2,
        "total_samples": 2000,
        "optimizer_steps": 22,
        "warmup_steps": 3,
        "drop_last": False,
        "shards": None,
        "betas": None,
        "eps": None,
        "weight_decay": None,
        "auto_rule": None,
        "digest": plan().digest,
    }
    assert plan().steps_per_epoch == 11
    assert [plan().samples_before(step) for step in (0, 1, 10, 11, 12, 22)] == [0, 96, 960, 1000, 1096, 2000]
    assert json.loads(json.dumps(plan().as_json())) == plan().as_json()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"drop_last": True}, {"optimizer_steps": 20, "total_samples": 1920}),
        ({"max_steps": 12}, {"optimizer_steps": 12, "total_samples": 1096}),
        ({"max_steps": 99}, {"optimizer_steps": 22, "total_samples": 2000}),
        ({"scaling": OF_REPLICAS}, {"lr_factor": 0.5, "lr": 5e-4}),
        ({"scaling": Scaling(ScalingRule.none, reference_batch=48)}, {"lr_factor": 1.0, "lr": 1e-3}),
        ({"global_batch": 9600, "samples_per_epoch": 960}, {"lr_factor": 20.0, "lr": 2e-2}),
        ({"warmup_share": 0.096, "max_steps": 10}, {"warmup_steps": 1}),  # 92.16 of 960 samples
        ({"warmup_share": 0.1, "max_steps": 10}, {"warmup_steps": 1}),  # 96: the step that starts there is at the peak
        ({"warmup_share": 0.11, "max_steps": 10}, {"warmup_steps": 2}),
        ({"global_batch": None, "micro_batch": 12, "world_size": 8}, {"global_batch": 192, "lr_factor": 4.0}),
        ({"accumulation_steps": None, "max_micro_batch": 10}, {"accumulation_steps": 3, "micro_batch": 8}),
        ({"global_batch": 2000, "accumulation_steps": 1}, {"optimizer_steps": 2, "total_samples": 2000}),
        # the smallest possible sizes
        ({"samples_per_epoch": 8}, {"optimizer_steps": 2}),
        ({"samples_per_epoch": 96, "drop_last": True}, {"optimizer_steps": 2}),
    ],
)
def test_what_a_setting_changes(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    made = plan(**changes).as_json()
    assert {name: made[name] for name in expected} == pytest.approx(expected)


def test_world_size_alone_changes_no_experiment() -> None:
    """With the global batch held, worker count and accumulation change neither steps, samples nor learning rate."""
    common = {"k", "global_batch", "lr", "lr_factor", "optimizer_steps", "warmup_steps", "total_samples"}
    plans = [plan(world_size=n, accumulation_steps=a).as_json() for n in (1, 2, 4, 8) for a in (1, 2, 3, 4)]
    assert all({name: made[name] for name in common} == {name: plans[0][name] for name in common} for made in plans)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_epoch": 7}, r"accumulation\.steps=2 .*8 micro-batches.* 7 training samples"),
        ({"samples_per_epoch": 95, "drop_last": True}, r"^batch\.drop_last=true .* 95 training samples.* 96"),
        ({"global_batch": 100}, r"^batch\.global_batch=100 .* 96 and 104$"),
    ],
)
def test_invalid_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(**changes)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Plan)])
def test_digest_changes_with_every_field(name: str) -> None:
    made = plan()
    value = getattr(made, name)
    other = (not value) if isinstance(value, bool) else (value or 0) + 1
    assert dataclasses.replace(made, **{name: other}).digest != made.digest


def test_the_digest_is_the_same_in_every_process() -> None:
    assert plan().digest == plan(max_steps=1000).digest
    assert Plan(*range(1, 17), False).digest == "6700501bdff36861"


def test_arithmetic_imports_neither_torch_nor_hydra() -> None:
    """The plan's numbers are plain arithmetic: importing it loads no heavy library."""
    code = (
        "import sys, runner.plan, runner.plan.schedule\n"
        "print([m for m in ('torch', 'hydra', 'omegaconf', 'numpy', 'mlflow', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout.strip() == "[]", done.stderr
