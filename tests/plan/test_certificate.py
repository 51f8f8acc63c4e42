"""The certificate: which differences keep a setup equivalent or comparable, and how large they are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from runner.backends.machine import library_versions
from runner.plan import make_plan
from runner.plan.baseline import RunSetup
from runner.plan.certificate import Certificate, certify
from runner.plan.properties import _ROWS, CertifiedProperty
from tests.configured import configured, prepared

VERSIONS = MappingProxyType({"python": "3.11.9", "torch": "2.13.0"})


def setup(
    overrides: str = "",
    workers: int = 1,
    data: str = "d0",
    has_dropout: bool = True,
    device_type: str = "cpu",
    rehearsed: bool = False,
    versions: Mapping[str, str] = VERSIONS,
    processor: str = "EPYC, AVX512",
    batch_statistics: bool = False,
    stopped_after: int | None = None,
) -> RunSetup:
    """A setup of 960 samples in global batches of 48 and six epochs."""
    config = configured(overrides)
    plan = make_plan(config, 960, workers)
    known = (versions, processor, batch_statistics, stopped_after)
    return RunSetup(config, plan, data, has_dropout, device_type, rehearsed, *known)


def different(certificate: Certificate) -> set[str]:
    return {item.name for item in certificate.properties if not item.equal}


def found(certificate: Certificate, name: str) -> CertifiedProperty:
    (item,) = (item for item in certificate.properties if item.name == name)
    return item


IDENTICAL, EQUIVALENT, COMPARABLE, NOT_COMPARABLE = "identical", "equivalent", "comparable", "not comparable"

#: Dropout that does not depend on the split.
EXACT: dict[str, Any] = {"overrides": "equivalence=exact"}

#: The same bits on any number of workers.
SHARDS: dict[str, Any] = {"overrides": "equivalence=identical"}

#: What follows the batch by the default rule.
SCALED = {"learning_rate", "scaled_settings"}

#: For each property a minimal difference: its name, the level, a baseline, a setup, and properties that differ with it.
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("recipe", NOT_COMPARABLE, {}, {"overrides": "recipe.model.layers=3"}, set()),
    ("adapter", NOT_COMPARABLE, {}, {"overrides": "adapter=lora"}, set()),
    ("global_batch", COMPARABLE, {}, {"overrides": "batch.global_batch=96 scaling=none"}, {"data_order"}),
    ("samples_seen", NOT_COMPARABLE, {}, {"overrides": "epochs=3"}, set()),
    ("data_order", COMPARABLE, {}, {"overrides": "batch.drop_last=true"}, set()),
    (
        "batch_statistics",
        COMPARABLE,
        {**EXACT, "batch_statistics": True},
        {"overrides": "equivalence=exact accumulation.steps=2", "batch_statistics": True},
        {"accumulation_steps"},
    ),
    (
        "loss_normalisation",
        COMPARABLE,
        {"overrides": "optimizer.clip_norm=null", "workers": 2},
        {"overrides": "optimizer.clip_norm=null sync.k=4", "workers": 2},
        {"sync"},
    ),
    ("learning_rate", COMPARABLE, {}, {"overrides": "optimizer.lr=2e-3"}, set()),
    ("schedule", COMPARABLE, {}, {"overrides": "schedule=cosine"}, {"learning_rate"}),
    ("optimizer", NOT_COMPARABLE, {}, {"overrides": "optimizer.weight_decay=0.1"}, set()),
    ("scaled_settings", COMPARABLE, {}, {"overrides": "scaling=half_life scaling.reference_batch=24"}, set()),
    ("clipping", NOT_COMPARABLE, {}, {"overrides": "optimizer.clip_norm=2"}, set()),
    (
        "clipping_scope",
        COMPARABLE,
        {"workers": 2},
        {"overrides": "sync.k=4", "workers": 2},
        {"sync", "loss_normalisation"},
    ),
    ("evaluation", NOT_COMPARABLE, {}, {"overrides": "evaluation.keep_best=true"}, set()),
    ("sync", COMPARABLE, {"overrides": "sync.k=2", "workers": 2}, {"overrides": "sync.k=4", "workers": 2}, set()),
    ("wire", COMPARABLE, {"workers": 2}, {"overrides": "sync.compress=bf16", "workers": 2}, set()),
    ("seed", NOT_COMPARABLE, {}, {"overrides": "seed=1"}, {"data_order"}),
    ("dropout", COMPARABLE, {}, {"overrides": "equivalence=exact"}, set()),
    ("precision", COMPARABLE, {}, {"overrides": "precision=bf16"}, set()),
    (
        "gathered_weights",
        COMPARABLE,
        {"overrides": "sharding=fsdp precision=bf16"},
        {"overrides": "sharding=fsdp precision=bf16 sharding.param_dtype=bf16"},
        set(),
    ),
    ("compile", COMPARABLE, {}, {"overrides": "compile=true"}, set()),
    ("gradient_checkpointing", COMPARABLE, {}, {"overrides": "gradient_checkpointing=true"}, set()),
    ("versions", COMPARABLE, {}, {"versions": {**VERSIONS, "torch": "2.14.0"}}, set()),
    ("summation", EQUIVALENT, SHARDS, {"overrides": "equivalence=identical equivalence.threads=2"}, set()),
    ("evaluation_batches", EQUIVALENT, SHARDS, {"overrides": "equivalence=identical evaluation.micro_batch=7"}, set()),
    ("world_size", EQUIVALENT, EXACT, {**EXACT, "workers": 4}, set()),
    ("accumulation_steps", EQUIVALENT, EXACT, {"overrides": "equivalence=exact accumulation.steps=4"}, set()),
    ("padding", EQUIVALENT, EXACT, {"overrides": "equivalence=exact recipe.padding=longest"}, set()),
    ("sharding", EQUIVALENT, {}, {"overrides": "sharding=fsdp"}, set()),
    ("device", EQUIVALENT, EXACT, {**EXACT, "device_type": "cuda"}, set()),
    ("processor", EQUIVALENT, EXACT, {**EXACT, "processor": "EPYC, AVX2"}, set()),
    ("rehearsed", EQUIVALENT, {}, {"rehearsed": True}, set()),
]


def test_every_property_has_a_case() -> None:
    assert [name for name, *_ in CASES] == [row.name for row in _ROWS]


@pytest.mark.parametrize(("name", "level", "baseline", "changed", "with_it"), CASES, ids=[case[0] for case in CASES])
def test_a_difference_in_each_property(
    name: str, level: str, baseline: dict[str, Any], changed: dict[str, Any], with_it: set[str]
) -> None:
    """A difference is listed with its effect, and with only what follows from it, and lowers the level as designed."""
    one, other = setup(**changed), setup(**baseline)
    certificate = certify(one, other)
    assert different(certificate) == {name, *with_it}
    assert (certificate.level, found(certificate, name).allows) == (level, level)
    for item in certificate.properties:
        assert bool(item.effect) is not item.equal
        assert (item.value != item.baseline) or item.equal or item.name == "learning_rate"
    back = certify(other, one)
    assert (different(back), back.level) == (different(certificate), level)
    assert different(certify(one, one)) == set()


@pytest.mark.parametrize(
    ("changes", "level", "names"),
    [
        ({}, EQUIVALENT, set()),
        # Only world size, accumulation, device or rehearsal differ.
        (
            {
                "overrides": "equivalence=exact accumulation.steps=2",
                "workers": 8,
                "rehearsed": True,
                "device_type": "cuda",
            },
            EQUIVALENT,
            {"world_size", "accumulation_steps", "rehearsed", "device"},
        ),
        # Standard dropout is drawn for each worker and micro-batch, and so depends on the device and the order.
        ({"device_type": "cuda"}, COMPARABLE, {"device", "dropout"}),
        ({"overrides": "batch.length_sorted=false"}, COMPARABLE, {"dropout"}),
        # One worker is always synchronous.
        ({"overrides": "sync.k=4"}, EQUIVALENT, set()),
        (
            {"overrides": "sync.k=4 equivalence=exact", "workers": 2},
            COMPARABLE,
            {"sync", "loss_normalisation", "clipping_scope", "world_size"},
        ),
        # Settings that change the learning rate.
        ({"overrides": "batch.global_batch=96"}, COMPARABLE, {"global_batch", "data_order", *SCALED}),
        ({"overrides": "scaling.reference_batch=24"}, COMPARABLE, SCALED),
        ({"overrides": "batch.order=keyed"}, COMPARABLE, {"data_order"}),
        # Settings that change only speed and logs, or the order of samples within a step under exact dropout.
        ({"overrides": "tracking=none ledger=warn cache_dir=x evaluation.micro_batch=7"}, EQUIVALENT, set()),
        ({"overrides": "equivalence=exact batch.length_sorted=false"}, EQUIVALENT, set()),
        # The worst difference decides.
        ({"overrides": "precision=bf16", "rehearsed": True}, COMPARABLE, {"precision", "rehearsed"}),
    ],
)
def test_levels(changes: dict[str, Any], level: str, names: set[str]) -> None:
    baseline = "equivalence=exact" if "equivalence=exact" in changes.get("overrides", "") else ""
    certificate = certify(setup(**changes), setup(baseline))
    assert certificate.level == level
    assert different(certificate) == names


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "d1"},
        {"overrides": "recipe.model.dropout=0.2"},
        {"overrides": "recipe.max_length=16"},
        {"overrides": "recipe=cola"},
    ],
    ids=str,
)
def test_a_different_model_or_different_data_are_not_comparable(changes: dict[str, Any]) -> None:
    """Data are compared by a digest of their content, models by every setting."""
    certificate = certify(setup(**changes), setup())
    assert "recipe" in different(certificate)
    assert certificate.level == NOT_COMPARABLE


def test_how_data_are_found_is_no_difference() -> None:
    """Where the same data come from, the metric, and the values that were tuned do not make another recipe."""
    moved = setup("recipe.data.train_samples=9000 recipe.metric=loss recipe.goal=min recipe.tuned.epochs=7")
    assert found(certify(moved, setup()), "recipe").equal


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (
            "batch.global_batch=96 scaling=linear optimizer.lr=1e-3",
            "batch.global_batch=96 scaling=none optimizer.lr=2e-3",
        ),
        ("batch.global_batch=192 scaling=sqrt", "batch.global_batch=192 scaling=none optimizer.lr=2e-3"),
        ("epochs=3", ""),  # a longer run has the same rate at the same share of its samples
    ],
)
def test_equal_peak_and_schedule_are_an_equal_learning_rate(a: str, b: str) -> None:
    """The learning rate is compared as a curve over the samples, however it was derived."""
    assert found(certify(setup(a), setup(b)), "learning_rate").equal


@pytest.mark.parametrize(
    ("overrides", "baseline", "change"),
    [
        ("optimizer.lr=2e-3", "", "× 2"),
        ("batch.global_batch=96 scaling=sqrt", "scaling=sqrt", "× 1.414"),
        # A warm-up over 10% of the samples instead of 20%: twice as high during the warm-up, 8/9 as high afterwards.
        ("schedule.warmup_share=0.1", "schedule.warmup_share=0.2", "up to × 2, at 1% of the samples"),
        # Half a cosine ends much lower than a straight line: (1 + cos 0.99π) / 2 instead of 0.01.
        (
            "schedule=cosine schedule.warmup_share=0",
            "schedule.warmup_share=0",
            f"up to × {(1 + math.cos(0.99 * math.pi)) / 2 / 0.01:.4g}, at 99% of the samples",
        ),
    ],
)
def test_how_much_the_learning_rate_differs(overrides: str, baseline: str, change: str) -> None:
    """A constant factor, or else the largest one and the share of the samples where it is reached."""
    item = found(certify(setup(overrides), setup(baseline)), "learning_rate")
    assert not item.equal
    assert item.change == change


@pytest.mark.parametrize(
    ("changes", "baseline", "name", "values", "change"),
    [
        ({"overrides": "epochs=3"}, {}, "samples_seen", (2880, 5760), "× 0.5"),
        ({"overrides": "seed=3"}, {"overrides": "seed=2"}, "seed", (3, 2), ""),  # a ratio would mean nothing
        (
            {"overrides": "seed=1 batch.drop_last=true batch.global_batch=96"},
            {},
            "data_order",
            ("seed 1, cut by 96, tails dropped", "seed 0, cut by 48"),
            "",
        ),
        (
            {"overrides": "evaluation.metric=loss evaluation.goal=min evaluation.every_steps=50"},
            {"overrides": "evaluation.keep_best=true evaluation.patience=3"},
            "evaluation",
            ("loss min, every 50 steps", "accuracy max, every epoch, best kept, patience 3"),
            "",
        ),
        (
            {"overrides": "optimizer=sgd optimizer.nesterov=true"},
            {},
            "optimizer",
            ("sgd, momentum 0.9, nesterov, decay 0", "adamw, betas [0.9, 0.999], eps 1e-08, decay 0.01"),
            "",
        ),
        (
            {"workers": 2, "overrides": "accumulation.steps=3 device.length_buckets=[16,32]"},
            EXACT,
            "dropout",
            ("2 × 3 sorted shares, padding none, lengths [16, 32], cpu", "by sample"),
            "",
        ),
    ],
)
def test_values_and_change(
    changes: dict[str, Any], baseline: dict[str, Any], name: str, values: tuple[Any, Any], change: str
) -> None:
    """Values are shown in words, and numbers with their ratio."""
    item = found(certify(setup(**changes), setup(**baseline)), name)
    assert ((item.value, item.baseline), item.change) == (values, change)


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ("optimizer.betas=[0.9,0.95]", ""),
        ("optimizer.eps=1e-6", ""),
        ("optimizer=sgd optimizer.momentum=0.8", "optimizer=sgd"),
        ("optimizer=sgd optimizer.nesterov=true", "optimizer=sgd"),
    ],
)
def test_every_setting_of_the_optimizer_counts(setting: str, other: str) -> None:
    certificate = certify(setup(setting), setup(other))
    assert "optimizer" in different(certificate)
    assert certificate.level == NOT_COMPARABLE


def test_dropout_differs_for_every_split_unless_it_is_exact() -> None:
    splits = [(1, 1), (1, 4), (4, 1), (2, 2)]

    def streams(equivalence: str) -> set[str]:
        setups = [setup(f"equivalence={equivalence} accumulation.steps={steps}", n) for n, steps in splits]
        return {found(certify(one, one), "dropout").value for one in setups}

    assert len(streams("standard")) == 4
    assert len(streams("exact")) == 1


def test_exact_dropout_does_not_depend_on_the_padding() -> None:
    for mode, level in (("exact", EQUIVALENT), ("standard", COMPARABLE)):
        one, other = (setup(f"equivalence={mode} device.length_buckets={of}") for of in ("[16,32]", "[32]"))
        assert certify(one, other).level == level


def test_a_model_without_dropout_is_equivalent_for_every_split() -> None:
    dry: dict[str, Any] = {"has_dropout": False}
    for changes in ({"workers": 4}, {"overrides": "accumulation.steps=4"}, {"device_type": "cuda"}, EXACT):
        assert certify(setup(**dry, **changes), setup(**dry)).level == EQUIVALENT


@pytest.mark.parametrize("decides", ["evaluation.keep_best=true", "evaluation.patience=2", ""])
def test_the_minimum_improvement_counts_only_where_it_decides(decides: str) -> None:
    certificate = certify(setup(f"{decides} evaluation.min_delta=0.5"), setup(decides))
    assert different(certificate) == ({"evaluation"} if decides else set())


def test_certificate_json() -> None:
    """certificate.json has the level and every property once, among the equal or the different ones."""
    content = json.loads(json.dumps(certify(setup(workers=4), setup()).as_json()))
    assert set(content) == {"level", "segments", "equal", "different"}
    assert [item["name"] for item in content["different"]] == ["dropout", "world_size"]
    assert set(content["different"][1]) == {"name", "value", "baseline", "equal", "allows", "change", "effect"}
    names = [item["name"] for part in ("equal", "different") for item in content[part]]
    assert sorted(names) == sorted(row.name for row in _ROWS)


def test_a_run_that_stopped_early_is_not_comparable() -> None:
    planned = certify(setup(workers=4), setup())
    stopped = certify(setup(workers=4, stopped_after=2880), setup())
    assert stopped.level == NOT_COMPARABLE
    item = found(stopped, "samples_seen")
    assert (item.value, item.baseline, item.equal, item.change) == (2880, 5760, False, "× 0.5")
    assert different(stopped) == different(planned) | {"samples_seen"}


@pytest.mark.parametrize(
    ("overrides", "level", "names"),
    [
        ("device=cpu", EQUIVALENT, ""),
        ("device=cpu batch.global_batch=96", EQUIVALENT, ""),  # the baseline has the run's global batch,
        ("device=cpu scaling=none optimizer.lr=3e-4 seed=3 epochs=2", EQUIVALENT, ""),  # its recipe and its seed
        ("setup=k4 device=cpu", EQUIVALENT, ""),
        ("device=cpu8 equivalence=exact accumulation.steps=3", EQUIVALENT, "world_size accumulation_steps"),
        ("device=tpu8 equivalence=exact", EQUIVALENT, "world_size rehearsed"),
        ("device=cpu4", COMPARABLE, "world_size dropout"),
        ("device=tpu8 sync.k=4", COMPARABLE, "world_size dropout sync loss_normalisation clipping_scope rehearsed"),
        ("device=cpu compile=true gradient_checkpointing=true", COMPARABLE, "compile gradient_checkpointing"),
        ("device=cpu4 recipe.model.dropout=0", EQUIVALENT, "world_size"),  # attention dropout is 0 by default
        ("device=cpu4 recipe.model.attention_dropout=0.1 recipe.model.dropout=0", COMPARABLE, "world_size dropout"),
        ("device=cpu batch=per_device", EQUIVALENT, ""),
        (
            "device=cpu batch=per_device accumulation.steps=2 scaling=none",
            COMPARABLE,
            "accumulation_steps dropout global_batch data_order",
        ),
        ("device=cpu4 scaling.batch=replica_batch", COMPARABLE, "world_size dropout learning_rate scaled_settings"),
        (
            "device=cpu2 max_steps=7 batch=per_device",
            COMPARABLE,
            "world_size dropout global_batch data_order learning_rate scaled_settings",
        ),
    ],
)
def test_levels_of_command_lines(overrides: str, level: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences from the baseline that follow from a command line, on a machine without GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    certificate = prepared(overrides).certificate
    assert (certificate.level, different(certificate)) == (level, set(names.split()))


def test_the_baseline_per_device_keeps_the_micro_batch() -> None:
    """Four workers of 32 samples are compared with one worker of 32, at half of the learning rate."""
    certificate = prepared("batch=per_device device=cpu4 scaling.reference_batch=32").certificate
    assert (found(certificate, "global_batch").value, found(certificate, "global_batch").baseline) == (128, 32)
    rate = found(certificate, "learning_rate")
    assert (rate.value, rate.baseline, rate.change) == (pytest.approx(2e-3), pytest.approx(1e-3), "× 2")
    assert found(certificate, "samples_seen").equal


@pytest.mark.parametrize("batch", ["fixed_global", "per_device"])
@pytest.mark.parametrize("max_steps", [1, 20, 21, 41, 1000])
def test_one_worker_is_its_own_baseline(batch: str, max_steps: int) -> None:
    """A run that max_steps ends anywhere has a baseline that sees as many samples."""
    assert (
        prepared(f"batch={batch} max_steps={max_steps} recipe.data.train_samples=970").certificate.level == EQUIVALENT
    )


def test_versions_of_a_run_are_those_installed() -> None:
    value = found(prepared().certificate, "versions").value
    assert [part.split()[0] for part in value.split(", ")] == [*library_versions("cpu")]
    assert f"torch {torch.__version__.partition('+')[0]}" in value


def test_shards_give_the_same_bits_on_any_workers() -> None:
    one = setup("equivalence=identical")
    assert certify(one, one).level == IDENTICAL
    rehearsed = certify(setup("equivalence=identical", workers=8, rehearsed=True), one)
    assert different(rehearsed) == {"world_size", "accumulation_steps", "rehearsed"}
    assert rehearsed.level == IDENTICAL
    assert {found(rehearsed, name).effect for name in different(rehearsed)} == {"none: the same bits"}


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ("equivalence=exact", {"summation", "evaluation_batches", "accumulation_steps"}),
        ("equivalence=identical equivalence.shards=4", {"summation", "accumulation_steps"}),
        ("equivalence=identical device.length_buckets=[8,16]", {"padding"}),
        ("equivalence=identical equivalence.threads=2", {"summation"}),
    ],
)
def test_other_shards_or_threads_have_other_bits(other: str, differs: set[str]) -> None:
    certificate = certify(setup(other), setup("equivalence=identical"))
    assert different(certificate) == differs
    assert certificate.level == EQUIVALENT


def test_half_precision_is_not_that_of_the_baseline() -> None:
    bf16 = setup("equivalence=identical precision=bf16", workers=4)
    assert certify(bf16, setup("equivalence=identical")).level == COMPARABLE
    assert certify(bf16, setup("equivalence=identical precision=bf16")).level == IDENTICAL
