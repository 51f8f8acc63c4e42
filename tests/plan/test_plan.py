"""The plan as a whole: derived numbers, invalid sizes, its digest, and what it does not import."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.errors import UserError
from runner.plan import Plan, make_plan
from tests.configured import configured

ROOT = Path(__file__).resolve().parents[2]


SETTINGS = (
    "scaling=linear batch.global_batch=96 accumulation.steps=2 sync.k=3 epochs=2 schedule.warmup_share=0.1 "
    "optimizer.lr=1e-3 scaling.reference_batch=48"
)


def plan(overrides: str = "", samples: int = 1000, workers: int = 4) -> Plan:
    """A plan of 1,000 samples on four workers, with changes."""
    return make_plan(configured(f"{SETTINGS} {overrides}"), samples, workers)


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
        "order": "permutation",
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
    ("overrides", "samples", "workers", "expected"),
    [
        ("batch.drop_last=true", 1000, 4, {"optimizer_steps": 20, "total_samples": 1920}),
        ("max_steps=12", 1000, 4, {"optimizer_steps": 12, "total_samples": 1096}),
        ("max_steps=99", 1000, 4, {"optimizer_steps": 22, "total_samples": 2000}),
        ("scaling.batch=replica_batch", 1000, 4, {"lr_factor": 0.5, "lr": 5e-4}),
        ("batch.global_batch=9600", 960, 4, {"lr_factor": 20.0, "lr": 2e-2}),
        ("schedule.warmup_share=0.096 max_steps=10", 1000, 4, {"warmup_steps": 1}),  # 92.16 of 960 samples
        ("max_steps=10", 1000, 4, {"warmup_steps": 1}),  # 96: the step that starts there is at the peak
        (
            "batch=per_device batch.global_batch=null batch.micro_batch=12",
            1000,
            8,
            {"global_batch": 192, "lr_factor": 4.0},
        ),
        ("batch.global_batch=2000 accumulation.steps=1", 1000, 4, {"optimizer_steps": 2, "total_samples": 2000}),
        # the smallest possible sizes
        ("", 8, 4, {"optimizer_steps": 2}),
        ("batch.drop_last=true", 96, 4, {"optimizer_steps": 2}),
    ],
)
def test_what_a_setting_changes(overrides: str, samples: int, workers: int, expected: dict[str, Any]) -> None:
    made = plan(overrides, samples, workers).as_json()
    assert {name: made[name] for name in expected} == pytest.approx(expected)


def test_world_size_alone_changes_no_experiment() -> None:
    """With the global batch held, worker count and accumulation change neither steps, samples nor learning rate."""
    common = {"k", "global_batch", "lr", "lr_factor", "optimizer_steps", "warmup_steps", "total_samples"}
    plans = [plan(f"accumulation.steps={a}", workers=n).as_json() for n in (1, 2, 4, 8) for a in (1, 2, 3, 4)]
    assert all({name: made[name] for name in common} == {name: plans[0][name] for name in common} for made in plans)


@pytest.mark.parametrize(
    ("overrides", "samples", "message"),
    [
        ("", 7, r"accumulation\.steps=2 .*8 micro-batches.* 7 training samples"),
        ("batch.drop_last=true", 95, r"^batch\.drop_last=true .* 95 training samples.* 96"),
    ],
)
def test_invalid_sizes(overrides: str, samples: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(overrides, samples)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Plan)])
def test_digest_changes_with_every_field(name: str) -> None:
    made = plan()
    value = getattr(made, name)
    other = (not value) if isinstance(value, bool) else "keyed" if isinstance(value, str) else (value or 0) + 1
    assert dataclasses.replace(made, **{name: other}).digest != made.digest


def test_the_digest_is_the_same_in_every_process() -> None:
    assert plan().digest == plan("max_steps=1000").digest
    assert Plan(*range(1, 17), False).digest == "6700501bdff36861"


def test_arithmetic_imports_neither_torch_nor_hydra() -> None:
    """The plan's numbers are plain arithmetic: importing it loads no heavy library."""
    code = (
        "import sys, runner.plan, runner.plan.schedule\n"
        "print([m for m in ('torch', 'hydra', 'omegaconf', 'numpy', 'mlflow', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout.strip() == "[]", done.stderr
