"""The typed configuration: its rules, and its way through plain data and back."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from pathlib import Path
from typing import Any

import pytest

from runner.config.choices import (
    AccumulationMode,
    BatchMode,
    DeviceKind,
    Goal,
    OptimizerName,
    ScalingRule,
    ScheduleName,
    SyncPolicyName,
    TrackerName,
)
from runner.config.compose import compose, settings
from runner.config.plain import from_plain, to_plain
from runner.config.schema import (
    Accumulation,
    Batch,
    Config,
    Device,
    Evaluation,
    Optimizer,
    Scaling,
    Schedule,
    Sync,
    Tracking,
)
from runner.errors import UserError
from runner.plan import Plan

ADAMW: dict[str, Any] = {"name": OptimizerName.adamw, "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
SGD: dict[str, Any] = {"name": OptimizerName.sgd, "lr": 0.1, "momentum": 0.9, "nesterov": False}
FIXED_GLOBAL: dict[str, Any] = {"mode": BatchMode.fixed_global, "global_batch": 48}
PER_DEVICE: dict[str, Any] = {"mode": BatchMode.per_device, "micro_batch": 32}
FIXED: dict[str, Any] = {"mode": AccumulationMode.fixed, "steps": 1}
AUTO: dict[str, Any] = {"mode": AccumulationMode.auto, "max_micro_batch": 16}


@pytest.fixture(scope="module")
def config() -> Config:
    return settings(compose([]))


@pytest.mark.parametrize(
    ("kind", "good", "setting", "values"),
    [
        (Device, {"kind": DeviceKind.cpu}, "device.workers", [0, -1]),
        (Device, {"kind": DeviceKind.cpu}, "device.length_buckets", [[], [0], [16, 0, 32], [-1], [32, -16]]),
        (Batch, FIXED_GLOBAL, "batch.global_batch", [0, -48, None]),
        (Batch, FIXED_GLOBAL, "batch.micro_batch", [8]),
        (Batch, PER_DEVICE, "batch.micro_batch", [0, -1, None]),
        (Batch, PER_DEVICE, "batch.global_batch", [96]),
        (Accumulation, FIXED, "accumulation.steps", [0, -2, None]),
        (Accumulation, FIXED, "accumulation.max_micro_batch", [16]),
        (Accumulation, AUTO, "accumulation.max_micro_batch", [0, None]),
        (Accumulation, AUTO, "accumulation.steps", [2]),
        (Sync, {"policy": SyncPolicyName.periodic, "k": 1}, "sync.k", [0, -4]),
        (Scaling, {"rule": ScalingRule.linear, "reference_batch": 32}, "scaling.reference_batch", [0, -1]),
        (Optimizer, ADAMW, "optimizer.lr", [0, 0.0, -1e-3, math.nan]),
        (Optimizer, ADAMW, "optimizer.weight_decay", [-0.01, math.nan, math.inf]),
        (Optimizer, ADAMW, "optimizer.clip_norm", [0.0, -1.0]),
        (Optimizer, ADAMW, "optimizer.betas", [[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.99, 0.999], [], None]),
        (Optimizer, ADAMW, "optimizer.eps", [0.0, -1e-8, None]),
        (Optimizer, ADAMW, "optimizer.momentum", [0.9]),
        (Optimizer, ADAMW, "optimizer.nesterov", [False]),
        (Optimizer, SGD, "optimizer.momentum", [1.0, -0.1, None]),
        (Optimizer, SGD, "optimizer.nesterov", [None]),
        (Optimizer, {**SGD, "momentum": 0.0}, "optimizer.nesterov", [True]),
        (Optimizer, SGD, "optimizer.betas", [[0.9, 0.999]]),
        (Optimizer, SGD, "optimizer.eps", [1e-8]),
        (Schedule, {"name": ScheduleName.linear}, "schedule.warmup_share", [-0.1, 1.0, 1.5, math.nan]),
        (Evaluation, {"metric": "accuracy"}, "evaluation.every_steps", [0, -1]),
        (Evaluation, {"metric": "accuracy"}, "evaluation.micro_batch", [0]),
        (Evaluation, {"metric": "accuracy"}, "evaluation.patience", [0]),
        (Evaluation, {"metric": "accuracy"}, "evaluation.min_delta", [-0.1, math.nan, math.inf]),
        (Tracking, {"kind": TrackerName.none}, "tracking.experiment", ["", "  "]),
    ],
)
def test_rules_of_a_section(kind: Any, good: dict[str, Any], setting: str, values: list[Any]) -> None:
    """Each wrong value is refused with exactly its own setting, while the rest of the section is right."""
    kind(**good)
    for value in values:
        with pytest.raises(UserError) as caught:
            kind(**{**good, setting.partition(".")[2]: value})
        message = str(caught.value)
        assert message.startswith(f"{setting}="), (value, message)
        assert " cannot be: " in message
        assert "\n" not in message


def test_infinite_learning_rate() -> None:
    """A learning rate has to be finite."""
    with pytest.raises(UserError, match=r"^optimizer\.lr="):
        Optimizer(**{**ADAMW, "lr": math.inf})


@pytest.mark.parametrize(("setting", "values"), [("seed", [-1, 2**31]), ("epochs", [0, -1]), ("max_steps", [0, -5])])
def test_rules_of_top_level_settings(config: Config, setting: str, values: list[int]) -> None:
    """Top-level settings are checked too, and named without a group."""
    for value in values:
        with pytest.raises(UserError, match=f"^{setting}={value} cannot be: "):
            dataclasses.replace(config, **{setting: value})


@pytest.mark.parametrize("setting", ["compile", "gradient_checkpointing"])
def test_what_exact_dropout_excludes(config: Config, setting: str) -> None:
    """Where dropout cannot be chosen, equivalence=exact is refused in a sentence that names both; each alone is not."""
    exact = settings(compose(["equivalence=exact"]))
    with pytest.raises(UserError) as caught:
        dataclasses.replace(exact, **{setting: True})
    message = str(caught.value)
    assert message.startswith(f"{setting}=true cannot be: ")
    assert message.endswith("equivalence=exact has to choose it; leave one of the two out")
    assert "\n" not in message
    assert getattr(dataclasses.replace(config, **{setting: True}), setting) is True


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Device, {"kind": DeviceKind.gpu, "workers": 1}),
        (Device, {"kind": DeviceKind.gpu, "length_buckets": [1]}),
        (Device, {"kind": DeviceKind.gpu, "length_buckets": [32, 8, 32]}),
        (Batch, {"mode": BatchMode.fixed_global, "global_batch": 1}),
        (Accumulation, {"mode": AccumulationMode.auto, "max_micro_batch": 1}),
        (Sync, {"policy": SyncPolicyName.periodic, "k": 1}),
        (Scaling, {"rule": ScalingRule.none, "reference_batch": 1}),
        (Optimizer, {**ADAMW, "betas": [0.0, 0.0], "weight_decay": 0.0, "clip_norm": None}),
        (Optimizer, {**SGD, "momentum": 0.0}),
        (Optimizer, {**SGD, "nesterov": True}),
        (Schedule, {"name": ScheduleName.cosine, "warmup_share": 0.0}),
        (Schedule, {"name": ScheduleName.cosine, "warmup_share": 0.99}),
        (Evaluation, {"metric": "x", "every_steps": 1, "micro_batch": 1, "patience": 1, "min_delta": 0.0}),
    ],
)
def test_values_on_the_edge_are_allowed(kind: Any, values: dict[str, Any]) -> None:
    """The smallest and largest allowed values are allowed."""
    assert {name: getattr(kind(**values), name) for name in values} == values


@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_seeds_on_the_edge(config: Config, seed: int) -> None:
    """The first and the last seed can be used."""
    assert dataclasses.replace(config, seed=seed).seed == seed


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["recipe=cola", "device=tpu8", "batch=per_device", "precision=bf16", "scaling=sqrt", "optimizer=sgd"],
        ["accumulation=auto", "schedule=cosine", "tracking=none", "max_steps=7", "evaluation.patience=2"],
        ["optimizer.betas=[0.8,0.9]", "trusted_packages=[recipes,mine]", "tracking.uri=http://host", "ledger=warn"],
        ["device=tpu8", "device.length_buckets=[16,32]"],
    ],
)
def test_round_trip_of_a_composed_config(overrides: list[str]) -> None:
    """A composed configuration comes back equal, types included, from the JSON that workers are handed."""
    config = settings(compose(overrides))
    plain = to_plain(config)
    back = from_plain(Config, json.loads(json.dumps(plain)))
    assert back == config
    for name in ("device", "batch", "accumulation", "precision", "sync", "scaling", "optimizer", "schedule"):
        assert type(getattr(back, name)) is type(getattr(config, name))
    assert back.device.kind is config.device.kind
    assert back.scaling.rule is config.scaling.rule
    assert to_plain(back) == plain


def test_plain_config_is_what_one_writes_in_yaml() -> None:
    """Plain data hold the names and numbers of the YAML files, and nothing but JSON types."""
    plain = to_plain(settings(compose(["device=cpu4", "optimizer.lr=2e-5", "evaluation.goal=min"])))
    assert plain["device"] == {"kind": "cpu", "workers": 4, "rehearse": "auto", "file": None, "length_buckets": None}
    assert plain["optimizer"]["lr"] == 2e-5
    assert plain["optimizer"]["betas"] == [0.9, 0.999]
    assert plain["evaluation"]["goal"] == "min"
    assert only_json(plain)


def only_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and only_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(only_json, value))
    return value is None or type(value) in (str, int, float, bool)


class Color(enum.Enum):
    red = 1


@dataclasses.dataclass(frozen=True)
class Inner:
    color: Color | None
    sizes: list[int]
    colors: list[Color]


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    maybe: Inner | None
    anything: Any


@pytest.mark.parametrize(
    "value",
    [
        Outer(Inner(Color.red, [1, 2], [Color.red]), None, {"a": [1, None]}),
        Outer(Inner(None, [], []), Inner(None, [3], []), None),
    ],
)
def test_round_trip_of_nested_types(value: Outer) -> None:
    """Optional values, lists of enums and dataclasses within dataclasses come back as what they were."""
    assert from_plain(Outer, json.loads(json.dumps(to_plain(value)))) == value


def test_round_trip_of_a_plan() -> None:
    """A plan, which the worker is handed too, keeps its digest."""
    plan = Plan(*range(1, 17), False)
    assert from_plain(Plan, json.loads(json.dumps(to_plain(plan)))).digest == plan.digest


def test_wrong_plain_data_are_no_config(config: Config) -> None:
    """A missing field, an unknown enum member and a value against the rules are not passed over."""
    plain = to_plain(config)
    with pytest.raises(KeyError):
        from_plain(Config, {key: value for key, value in plain.items() if key != "seed"})
    with pytest.raises(KeyError):
        from_plain(Config, {**plain, "precision": {"name": "fp12"}})
    with pytest.raises(UserError, match=r"^sync\.k=0"):
        from_plain(Config, {**plain, "sync": {**plain["sync"], "k": 0}})


def test_paths_and_enum_members() -> None:
    """Paths become text, enum members their names, tuples lists."""
    assert to_plain({"folder": Path("/a/b"), "goal": Goal.max, 1: (1, 2)}) == {
        "folder": "/a/b",
        "goal": "max",
        "1": [1, 2],
    }


def test_config_is_frozen(config: Config) -> None:
    """Nobody can change settings after they were checked."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sync.k = 0  # type: ignore[misc]
