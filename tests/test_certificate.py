"""Certificate levels: what a setup may differ in and still be called equivalent, or comparable."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from runner.certificate import Certificate, Setup, certify, dropout_streams
from runner.compose import compose, settings
from runner.experiment import prepare
from runner.plan import Plan, make_plan


def plan(**changes: Any) -> Plan:
    settings_: dict[str, Any] = {
        "samples_per_epoch": 960,
        "world_size": 1,
        "global_batch": 48,
        "micro_batch": None,
        "accumulation_steps": 1,
        "max_micro_batch": None,
        "drop_last": False,
        "k": 1,
        "base_lr": 1e-3,
        "scaling_rule": "linear",
        "scaling_batch": "global_batch",
        "reference_batch": 48,
        "epochs": 2,
        "max_steps": None,
        "warmup_share": 0.1,
    }
    return make_plan(**{**settings_, **changes})


def setup(
    precision: str = "fp32", rehearsed: bool = False, streams: str = "one", compiled: bool = False, **changes: Any
) -> Setup:
    """A setup; `streams` is given, as under a recipe whose dropout does not depend on the split."""
    return Setup(plan(**changes), precision, rehearsed, streams, compiled)


def different(certificate: Certificate) -> set[str]:
    return {item.name for item in certificate.properties if not item.equal}


@pytest.mark.parametrize(
    ("changes", "level", "names"),
    [
        ({}, "equivalent", set()),
        # Only world size, accumulation, device or rehearsal differ.
        ({"world_size": 4}, "equivalent", {"world_size"}),
        ({"accumulation_steps": 4}, "equivalent", {"accumulation_steps"}),
        ({"rehearsed": True}, "equivalent", {"rehearsed"}),
        (
            {"world_size": 8, "accumulation_steps": 2, "rehearsed": True},
            "equivalent",
            {"world_size", "accumulation_steps", "rehearsed"},
        ),
        # One worker has nobody to drift from.
        ({"k": 4}, "equivalent", set()),
        # Listed differences.
        ({"k": 4, "world_size": 2}, "comparable", {"k", "world_size"}),
        ({"precision": "bf16"}, "comparable", {"precision"}),
        ({"precision": "fp64"}, "comparable", {"precision"}),
        ({"streams": "two"}, "comparable", {"dropout_streams"}),
        ({"compiled": True}, "comparable", {"compile"}),
        ({"base_lr": 2e-3}, "comparable", {"lr"}),
        ({"global_batch": 96, "scaling_rule": "none"}, "comparable", {"global_batch", "warmup_steps"}),
        ({"global_batch": 96}, "comparable", {"global_batch", "lr", "warmup_steps"}),
        ({"warmup_share": 0.5}, "comparable", {"warmup_steps"}),
        # One listed difference is enough, however many free ones stand beside it.
        ({"precision": "bf16", "world_size": 4}, "comparable", {"precision", "world_size"}),
    ],
)
def test_levels(changes: dict[str, Any], level: str, names: set[str]) -> None:
    """The level is the best that all differences allow, and exactly the properties that differ are listed."""
    certificate = certify(setup(**changes), setup())
    assert certificate.level == level
    assert different(certificate) == names


@pytest.mark.parametrize("changes", [{"epochs": 3}, {"max_steps": 10}])
def test_other_samples_are_not_comparable(changes: dict[str, Any]) -> None:
    """Runs that see another number of samples are not comparable."""
    certificate = certify(setup(**changes), setup())
    assert "total_samples" in different(certificate)
    assert certificate.level == "not comparable"


def test_differences_say_what_they_do_and_equalities_do_not() -> None:
    """A difference has both values and an effect in words; what is equal has no effect."""
    certificate = certify(setup(world_size=2, k=4, precision="bf16"), setup())
    values = {item.name: (item.value, item.baseline) for item in certificate.properties if not item.equal}
    assert values == {"world_size": (2, 1), "k": (4, 1), "precision": ("bf16", "fp32")}
    assert all(bool(item.effect) is not item.equal for item in certificate.properties)
    assert len({item.name for item in certificate.properties}) == len(certificate.properties)


def test_certificate_json() -> None:
    """certificate.json has the level, and every property once: as equal, or as different."""
    certificate = certify(setup(world_size=4), setup())
    content = json.loads(json.dumps(certificate.as_json()))
    assert content["level"] == "equivalent"
    equal, unequal = ({item["name"] for item in content[part]} for part in ("equal", "different"))
    assert unequal == {"world_size"}
    assert equal >= {"global_batch", "total_samples", "lr", "k", "precision", "dropout_streams"}
    assert not equal & unequal
    assert len(content["equal"]) + len(content["different"]) == len(certificate.properties)


def test_dropout_streams() -> None:
    """Workers and micro-batches draw other numbers than one worker with whole batches, and than each other."""
    streams = [dropout_streams(plan(world_size=n, accumulation_steps=a)) for n, a in ((1, 1), (1, 4), (4, 1), (2, 2))]
    assert len(set(streams)) == 4
    assert dropout_streams(plan(global_batch=96)) == dropout_streams(plan())


@pytest.mark.parametrize(
    ("overrides", "level", "names"),
    [
        ("device=cpu", "equivalent", ""),
        ("device=cpu batch.global_batch=96", "equivalent", ""),  # the baseline keeps the run's global batch
        ("device=cpu scaling=none optimizer.lr=3e-4 seed=3 epochs=2", "equivalent", ""),  # and its recipe and seed
        ("device=cpu max_steps=10", "equivalent", ""),
        ("device=gpu", "equivalent", "rehearsed"),
        ("setup=k4 device=cpu", "equivalent", ""),
        ("device=cpu accumulation.steps=2", "comparable", "accumulation_steps dropout_streams"),
        ("device=cpu4", "comparable", "world_size dropout_streams"),
        ("device=tpu8 sync.k=4", "comparable", "world_size dropout_streams k rehearsed"),
        ("device=cpu precision=bf16", "comparable", "precision"),
        ("device=cpu batch=per_device", "equivalent", ""),
        (
            "device=cpu4 batch=per_device",
            "comparable",
            "world_size dropout_streams global_batch lr warmup_steps",
        ),
        (
            "device=cpu batch=per_device accumulation.steps=2 scaling=none",
            "comparable",
            "accumulation_steps dropout_streams global_batch warmup_steps",
        ),
        ("device=cpu4 scaling.batch=replica_batch", "comparable", "world_size dropout_streams lr"),
    ],
)
def test_levels_of_real_setups(overrides: str, level: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: each setup gets the level and the differences that follow from what it changes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    certificate = prepare(settings(compose(overrides.split()))).certificate
    assert certificate.level == level
    assert different(certificate) == set(names.split())


def test_baseline_per_device_keeps_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under batch=per_device four workers of 32 are compared with one worker of 32, at a quarter of the rate."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    overrides = ["batch=per_device", "device=cpu4", "scaling.reference_batch=32"]
    certificate = prepare(settings(compose(overrides))).certificate
    of = {item.name: (item.value, item.baseline) for item in certificate.properties}
    assert of["global_batch"] == (128, 32)
    assert of["lr"] == pytest.approx((4e-3, 1e-3))
    assert of["total_samples"] == (48_000, 48_000)
