"""The typed configuration: its rules, and its conversion to plain data and back."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any

import pytest

from runner.config.choices import Goal
from runner.config.plain import from_plain, to_plain
from runner.config.schema import Config
from runner.errors import UserError
from runner.plan import Plan
from tests.configured import configured

PER_DEVICE, AUTO, SGD = "batch=per_device", "accumulation=auto", "optimizer=sgd"


@pytest.mark.parametrize(
    ("given", "setting", "values"),
    [
        ("", "seed", ["-1", 2**31]),
        ("", "epochs", ["0"]),
        ("", "max_steps", ["0"]),
        ("", "nonfinite_steps", ["0"]),
        ("", "device.workers", ["0"]),
        ("", "device.length_buckets", ["[]", "[16,0]"]),
        ("", "batch.global_batch", ["0", "null"]),
        ("", "batch.micro_batch", ["8"]),
        (PER_DEVICE, "batch.micro_batch", ["0", "null"]),
        (PER_DEVICE, "batch.global_batch", ["96"]),
        ("", "accumulation.steps", ["0", "null"]),
        ("", "accumulation.max_micro_batch", ["16"]),
        (AUTO, "accumulation.max_micro_batch", ["0", "null"]),
        (AUTO, "accumulation.steps", ["2"]),
        ("", "accumulation.memory_share", ["0.5"]),
        ("accumulation=fit", "accumulation.memory_share", ["0", "1.5", ".nan", "null"]),
        ("accumulation=fit", "accumulation.steps", ["2"]),
        ("", "scaling.reference_batch", ["0"]),
        ("", "optimizer.lr", ["0", ".nan", ".inf"]),
        ("", "optimizer.weight_decay", ["-0.01", ".nan", ".inf"]),
        ("", "optimizer.clip_norm", ["0"]),
        ("", "optimizer.betas", ["[0.9]", "[0.9,1.0]", "null"]),
        ("", "optimizer.eps", ["0", "null"]),
        ("", "optimizer.momentum", ["0.9"]),
        ("", "optimizer.nesterov", ["false"]),
        (SGD, "optimizer.momentum", ["1", "-0.1", "null"]),
        (f"{SGD} optimizer.momentum=0", "optimizer.nesterov", ["true"]),
        (SGD, "optimizer.eps", ["1e-8"]),
        ("optimizer=adafactor", "optimizer.eps", ["1e-8"]),
        ("optimizer=rmsprop", "optimizer.betas", ["[0.9,0.9]"]),
        ("optimizer=adagrad", "optimizer.eps", ["0"]),
        ("", "schedule.warmup_share", ["-0.1", "1", ".nan"]),
        ("", "schedule.min_lr_share", ["-0.1", "1", ".nan"]),
        ("schedule=polynomial", "schedule.power", ["0", "-1", ".inf"]),
        ("schedule=wsd schedule.warmup_share=0.2", "schedule.decay_share", ["0", "0.9", ".nan"]),
        ("", "schedule.decay_share", ["0.2"]),
        ("schedule=constant", "schedule.min_lr_share", ["0.1"]),
        ("", "evaluation.every_steps", ["0"]),
        ("", "evaluation.micro_batch", ["0"]),
        ("", "evaluation.patience", ["0"]),
        ("", "evaluation.min_delta", ["-0.1", ".inf"]),
        ("", "checkpoint.every_minutes", ["0", "-1", ".inf"]),
        ("", "checkpoint.every_steps", ["0"]),
        ("", "checkpoint.keep", ["0"]),
        ("", "tracking.experiment", ["''"]),
        ("tracking=none", "tracking.uri", ["x"]),
        ("tracking=none", "tracking.log_model", ["true"]),
        ("", "profile.steps", ["0"]),
        ("equivalence=identical", "equivalence.threads", ["0"]),
        ("equivalence=exact", "compile", ["true"]),
        ("equivalence=exact", "gradient_checkpointing", ["true"]),
        # sync
        ("", "sync.k", ["0"]),
        ("", "sync.schedule", ["post_local"]),
        ("sync.k=4", "sync.synchronous_share", ["0.5"]),
        ("sync.k=4 sync.schedule=post_local", "sync.synchronous_share", ["0", "1"]),
        ("sync.k=4", "sync.qsr_alpha", ["1"]),
        ("sync.k=4 sync.schedule=qsr", "sync.qsr_alpha", ["0", ".inf"]),
        ("", "sync.overlap", ["true"]),
        ("sync=accumulated sync.k=1", "sync.overlap", ["true"]),
        ("sync=gradients", "sync.overlap", ["true"]),
        ("sync.k=4", "sync.delay", ["2"]),
        ("sync.k=4 sync.overlap=true", "sync.delay", ["0", "5"]),
        ("sync.k=4", "sync.fragments", ["0", "5", "all"]),
        ("sync=gradients", "sync.fragments", ["2", "auto"]),
        ("sync.k=4", "sync.outer_lr", ["1"]),
        ("sync=outer", "sync.outer_lr", ["0", "null"]),
        ("sync=outer", "sync.outer_momentum", ["1"]),
        ("sync=slowmo sync.outer_momentum=0", "sync.outer_nesterov", ["true"]),
        ("", "sync.compress", ["int8"]),
        ("sync=gradients", "sync.compress", ["int8"]),
        ("sync.k=4 sync.schedule=post_local", "sync.compress", ["int8"]),
        ("sync.k=4 precision=fp16", "sync.policy", ["gradients"]),
    ],
)
def test_invalid_values(given: str, setting: str, values: list[Any]) -> None:
    """Each invalid value is refused with its own setting, while the other settings are accepted."""
    configured(given)
    for value in values:
        with pytest.raises(UserError) as caught:
            configured(f"{given} {setting}={value}")
        message = str(caught.value)
        assert message.startswith(f"{setting}="), (value, message)
        assert " is invalid: " in message
        assert "\n" not in message


@pytest.mark.parametrize(
    "overrides",
    [
        "seed=2147483647 device.workers=1 device.length_buckets=[32,8,32] batch.global_batch=1",
        "optimizer.betas=[0,0] optimizer.weight_decay=0 optimizer.clip_norm=null schedule.warmup_share=0.99",
        "optimizer=sgd optimizer.momentum=0",
        "evaluation.every_steps=1 evaluation.patience=1 evaluation.min_delta=0 max_steps=1 epochs=1",
        "sync.k=4 sync.overlap=true sync.delay=4",
        "sync=outer sync.overlap=true sync.compress=fp16 sync.schedule=qsr",
        "sync=accumulated sync.k=1 sync.compress=bf16",
        "sync=outer sync.k=4 sync.fragments=4 sync.overlap=true sync.delay=4",
        "sync=slowmo sync.schedule=post_local sync.synchronous_share=0.1",
        "sync=gradients sync.k=1 precision.name=fp16",
    ],
)
def test_values_that_are_allowed(overrides: str) -> None:
    """The limits of ranges are allowed, and the rules of `sync` refuse no more than necessary."""
    configured(overrides)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ("", 0),
        ("sync.overlap=true", 4),
        ("sync.overlap=true sync.delay=2", 2),
        ("sync.overlap=true sync.fragments=3", 2),
        ("sync.overlap=true sync.fragments=auto", 1),
    ],
)
def test_delay_of_an_average(given: str, steps: int) -> None:
    """By default half of k for each fragment, rounded up."""
    assert configured(f"sync.k=7 {given}").sync.delay_steps == steps


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "recipe=cola device=tpu8 batch=per_device precision=bf16 scaling=sqrt optimizer=sgd tracking=none",
        "optimizer.betas=[0.8,0.9] trusted_packages=[recipes,mine] max_steps=7 device.length_buckets=[16,32]",
    ],
)
def test_round_trip_of_a_config(overrides: str) -> None:
    """A configuration comes back equal, types included, from the JSON that workers receive."""
    config = configured(overrides)
    plain = to_plain(config)
    back = from_plain(Config, json.loads(json.dumps(plain)))
    assert back == config
    assert back.device.kind is config.device.kind
    assert to_plain(back) == plain


def test_plain_data_are_the_values_of_the_yaml_files() -> None:
    plain = to_plain(configured("device=cpu4 evaluation.goal=min"))
    assert plain["device"] == {"kind": "cpu", "workers": 4, "rehearse": "auto", "file": None, "length_buckets": None}
    assert (plain["optimizer"]["betas"], plain["evaluation"]["goal"]) == ([0.9, 0.999], "min")
    assert to_plain({"folder": Path("/a/b"), "goal": Goal.max, 1: (1, 2)}) == {
        "folder": "/a/b",
        "goal": "max",
        "1": [1, 2],
    }


class Color(enum.Enum):
    red = 1


@dataclasses.dataclass(frozen=True)
class Inner:
    color: Color | None
    colors: list[Color]


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    maybe: Inner | None
    anything: Any


def test_round_trip_of_nested_types() -> None:
    for value in (
        Outer(Inner(Color.red, [Color.red]), None, {"a": [1, None]}),
        Outer(Inner(None, []), Inner(None, []), None),
    ):
        assert from_plain(Outer, json.loads(json.dumps(to_plain(value)))) == value
    plan = Plan(*range(1, 17), False)
    assert from_plain(Plan, json.loads(json.dumps(to_plain(plan)))).digest == plan.digest


def test_a_file_of_an_older_version() -> None:
    """Without a field that has a default, such as the shards of a plan."""
    plan = Plan(*range(1, 17), False)
    older = {name: value for name, value in to_plain(plan).items() if name != "shards"}
    assert from_plain(Plan, older) == plan


def test_wrong_plain_data() -> None:
    """A missing field, an unknown enum member, a value of another type or against the rules are errors."""
    plain = to_plain(configured())
    with pytest.raises(ValueError, match="seed"):
        from_plain(Config, {key: value for key, value in plain.items() if key != "seed"})
    with pytest.raises(ValueError, match="fp12"):
        from_plain(Config, {**plain, "precision": {"name": "fp12"}})
    for wrong in ("0", 0.5, True, None, [0]):
        with pytest.raises(ValueError, match=r"^seed is "):
            from_plain(Config, {**plain, "seed": wrong})
    with pytest.raises(UserError, match=r"^sync\.k=0"):
        from_plain(Config, {**plain, "sync": {**plain["sync"], "k": 0}})
