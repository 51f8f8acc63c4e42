"""The certificate: what a setup may differ in and still be called equivalent, or comparable; by how much, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
from runner.backends.versions import library_versions

from runner.config.compose import compose, settings
from runner.config.schema import Config
from runner.plan.certificate import _ROWS, Certificate, Property, Setup, after_stopping, certify
from runner.plan.experiment import Experiment, plan_for, prepare

VERSIONS = MappingProxyType({"python": "3.11.9", "torch": "2.13.0"})


@cache
def config(overrides: str) -> Config:
    return settings(compose(["device=cpu", *overrides.split()]))


def setup(
    overrides: str = "",
    workers: int = 1,
    data: str = "d0",
    has_dropout: bool = True,
    device_type: str = "cpu",
    rehearsed: bool = False,
    versions: Mapping[str, str] = VERSIONS,
    batch_statistics: bool = False,
) -> Setup:
    """A setup of 960 samples in global batches of 48, six epochs unless told otherwise."""
    plan = plan_for(config(overrides), 960, workers)
    return Setup(config(overrides), plan, data, has_dropout, device_type, rehearsed, versions, batch_statistics)


def different(certificate: Certificate) -> set[str]:
    return {item.name for item in certificate.properties if not item.equal}


def found(certificate: Certificate, name: str) -> Property:
    (item,) = (item for item in certificate.properties if item.name == name)
    return item


EQUIVALENT, COMPARABLE, NOT_COMPARABLE = "equivalent", "comparable", "not comparable"

#: Dropout that does not depend on the split, so that the split can be looked at alone.
EXACT: dict[str, Any] = {"overrides": "equivalence=exact"}

#: The least that turns each row red: the row, what it allows, a baseline, a setup, and the rows that go with it.
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("recipe", NOT_COMPARABLE, {}, {"overrides": "recipe.model.layers=3"}, set()),
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
    ("compile", COMPARABLE, {}, {"overrides": "compile=true"}, set()),
    ("gradient_checkpointing", COMPARABLE, {}, {"overrides": "gradient_checkpointing=true"}, set()),
    ("versions", COMPARABLE, {}, {"versions": {**VERSIONS, "torch": "2.14.0"}}, set()),
    ("world_size", EQUIVALENT, EXACT, {**EXACT, "workers": 4}, set()),
    ("accumulation_steps", EQUIVALENT, EXACT, {"overrides": "equivalence=exact accumulation.steps=4"}, set()),
    ("device", EQUIVALENT, EXACT, {**EXACT, "device_type": "cuda"}, set()),
    ("rehearsed", EQUIVALENT, {}, {"rehearsed": True}, set()),
]


def test_every_row_has_one_case() -> None:
    """The next test turns each property red once, in the order in which they are shown, and leaves none out."""
    assert [name for name, *_ in CASES] == [row.name for row in _ROWS]
    assert len({row.name for row in _ROWS}) == len(_ROWS)


@pytest.mark.parametrize(("name", "level", "baseline", "changed", "with_it"), CASES, ids=[case[0] for case in CASES])
def test_every_row_turns_red(
    name: str, level: str, baseline: dict[str, Any], changed: dict[str, Any], with_it: set[str]
) -> None:
    """A change is listed under its own name, with nothing but what follows from it, and costs what the design says."""
    certificate = certify(setup(**changed), setup(**baseline))
    assert different(certificate) == {name, *with_it}
    assert certificate.level == level
    item = found(certificate, name)
    assert item.allows == level
    assert (item.value, item.baseline) == (
        found(certify(setup(**changed), setup(**changed)), name).value,
        found(certify(setup(**baseline), setup(**baseline)), name).value,
    )
    # The other way round the same properties differ, at the same cost.
    back = certify(setup(**baseline), setup(**changed))
    assert (different(back), back.level) == (different(certificate), level)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_setup_equals_itself(case: tuple[str, str, dict[str, Any], dict[str, Any], set[str]]) -> None:
    """Whatever is unusual about a setup, compared with itself it is equivalent and nothing differs."""
    certificate = certify(setup(**case[3]), setup(**case[3]))
    assert (certificate.level, different(certificate)) == (EQUIVALENT, set())


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
        # Standard dropout is drawn by each worker and each micro-batch.
        ({"workers": 4}, COMPARABLE, {"world_size", "dropout"}),
        ({"overrides": "accumulation.steps=4"}, COMPARABLE, {"accumulation_steps", "dropout"}),
        ({"device_type": "cuda"}, COMPARABLE, {"device", "dropout"}),
        ({"overrides": "batch.length_sorted=false"}, COMPARABLE, {"dropout"}),
        # One worker has nobody to drift from.
        ({"overrides": "sync.k=4"}, EQUIVALENT, set()),
        (
            {"overrides": "sync.k=4 equivalence=exact", "workers": 2},
            COMPARABLE,
            {"sync", "loss_normalisation", "clipping_scope", "world_size"},
        ),
        # What moves the learning rate.
        ({"overrides": "batch.global_batch=96"}, COMPARABLE, {"global_batch", "data_order", "learning_rate"}),
        ({"overrides": "scaling.reference_batch=24"}, COMPARABLE, {"learning_rate"}),
        ({"overrides": "schedule.warmup_share=0.5"}, COMPARABLE, {"schedule", "learning_rate"}),
        ({"overrides": "schedule=constant"}, COMPARABLE, {"schedule", "learning_rate"}),
        # What changes nothing but speed and records, and the order of samples within a step for exact dropout.
        ({"overrides": "tracking=none ledger=warn cache_dir=x evaluation.micro_batch=7"}, EQUIVALENT, set()),
        ({"overrides": "equivalence=exact batch.length_sorted=false"}, EQUIVALENT, set()),
        # One listed difference is enough, however many free ones stand beside it; the worst one decides.
        ({"overrides": "precision=bf16", "rehearsed": True}, COMPARABLE, {"precision", "rehearsed"}),
        ({"overrides": "precision=bf16 optimizer.eps=1e-6"}, NOT_COMPARABLE, {"precision", "optimizer"}),
        ({"overrides": "max_steps=10"}, NOT_COMPARABLE, {"samples_seen"}),
    ],
)
def test_levels(changes: dict[str, Any], level: str, names: set[str]) -> None:
    """The level is the worst that any difference allows, and exactly the properties that differ are listed."""
    baseline = "equivalence=exact" if "equivalence=exact" in changes.get("overrides", "") else ""
    certificate = certify(setup(**changes), setup(baseline))
    assert certificate.level == level
    assert different(certificate) == names


# --- model and data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "d1"},
        {"overrides": "recipe.model.hidden_size=64"},
        {"overrides": "recipe.model.shape=gpt2"},
        {"overrides": "recipe.model.dropout=0.2"},
        {"overrides": "recipe.max_length=16"},
        {"overrides": "recipe=cola"},
    ],
    ids=str,
)
def test_another_model_or_other_data_are_not_comparable(changes: dict[str, Any]) -> None:
    """Data are told apart by a digest of their content, models by every setting; the name alone is not enough."""
    certificate = certify(setup(**changes), setup())
    item = found(certificate, "recipe")
    assert not item.equal
    assert item.value != item.baseline
    assert certificate.level == NOT_COMPARABLE


def test_how_data_are_found_is_no_difference() -> None:
    """The same data from another place, a metric to decide by, and what the rate was tuned with are no other recipe."""
    moved = setup("recipe.data.train_samples=9000 recipe.metric=loss recipe.goal=min recipe.tuned.epochs=7 epochs=6")
    assert found(certify(moved, setup()), "recipe").equal


# --- learning rate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("batch.global_batch=96 optimizer.lr=1e-3", "batch.global_batch=96 scaling=none optimizer.lr=2e-3"),
        ("batch.global_batch=192 scaling=sqrt", "batch.global_batch=192 scaling=none optimizer.lr=2e-3"),
        ("scaling.reference_batch=96 optimizer.lr=4e-3", "scaling=none optimizer.lr=2e-3"),
        ("batch.global_batch=96 scaling=none", "scaling=none"),
        ("epochs=3", ""),  # a longer run has the same rate at the same share of its samples
    ],
)
def test_equal_peak_and_schedule_are_an_equal_learning_rate(a: str, b: str) -> None:
    """However the peak comes about and whatever the steps, one curve over the samples is one learning rate."""
    item = found(certify(setup(a), setup(b)), "learning_rate")
    assert item.equal
    assert (item.change, item.effect) == ("", "")


@pytest.mark.parametrize(
    ("overrides", "baseline", "change"),
    [
        ("optimizer.lr=2e-3", "", "× 2"),
        ("optimizer.lr=2.5e-4", "", "× 0.25"),
        ("batch.global_batch=96", "", "× 2"),
        ("batch.global_batch=96 scaling=sqrt", "scaling=sqrt", "× 1.414"),
        ("optimizer.lr=3e-3 schedule=constant", "schedule=constant", "× 3"),
        # A rise over 10% of the samples beside one over 20%: twice as high all the way up, 8/9 as high afterwards.
        ("schedule.warmup_share=0.1", "schedule.warmup_share=0.2", "up to × 2, at 1% of the samples"),
        ("schedule.warmup_share=0.2", "schedule.warmup_share=0.1", "up to × 0.5, at 1% of the samples"),
        # Half a cosine ends much lower than a straight line does: (1 + cos 0.99π) / 2 beside 0.01.
        (
            "schedule=cosine schedule.warmup_share=0",
            "schedule.warmup_share=0",
            f"up to × {(1 + math.cos(0.99 * math.pi)) / 2 / 0.01:.4g}, at 99% of the samples",
        ),
        ("schedule=constant schedule.warmup_share=0", "schedule.warmup_share=0", "up to × 100, at 99% of the samples"),
    ],
)
def test_how_much_the_learning_rate_differs(overrides: str, baseline: str, change: str) -> None:
    """One factor where it is one throughout; otherwise the largest, up or down, and where it is met."""
    item = found(certify(setup(overrides), setup(baseline)), "learning_rate")
    assert not item.equal
    assert item.change == change


# --- the other properties -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "baseline", "name", "values", "change"),
    [
        ({"overrides": "batch.global_batch=96"}, {}, "global_batch", (96, 48), "× 2"),
        ({"overrides": "batch.global_batch=32"}, {}, "global_batch", (32, 48), "× 0.6667"),
        ({"overrides": "epochs=3"}, {}, "samples_seen", (2880, 5760), "× 0.5"),
        ({"workers": 4}, {}, "world_size", (4, 1), "× 4"),
        ({"overrides": "accumulation.steps=3"}, {}, "accumulation_steps", (3, 1), "× 3"),
        ({"overrides": "seed=3"}, {"overrides": "seed=2"}, "seed", (3, 2), ""),  # a name, and no quantity
        ({"rehearsed": True}, {}, "rehearsed", (True, False), ""),  # and yes is none of no
        ({"overrides": "compile=true"}, {}, "compile", (True, False), ""),
        ({"overrides": "precision=fp16"}, {}, "precision", ("fp16", "fp32"), ""),
        ({"overrides": "precision=fp64"}, {}, "precision", ("fp64", "fp32"), ""),
        ({"device_type": "cuda"}, {}, "device", ("cuda", "cpu"), ""),
        (
            {"overrides": "seed=1 batch.drop_last=true batch.global_batch=96"},
            {},
            "data_order",
            ("seed 1, cut by 96, tails dropped", "seed 0, cut by 48"),
            "",
        ),
        (
            {"overrides": "sync.k=4", "workers": 2},
            {"workers": 2},
            "loss_normalisation",
            ("sum ÷ worker's count", "sum ÷ global count"),
            "",
        ),
        (
            {"overrides": "sync.k=4", "workers": 2},
            {},
            "sync",
            ("weights every 4 steps, dealt by length", "every step"),
            "",
        ),
        (
            {"overrides": "sync.k=4 batch.length_sorted=false", "workers": 2},
            {"overrides": "sync.k=2", "workers": 2},
            "sync",
            ("weights every 4 steps", "weights every 2 steps, dealt by length"),
            "",
        ),
        (
            {"overrides": "sync.k=4", "workers": 2},
            {},
            "clipping_scope",
            ("each worker", "global batch"),
            "",
        ),
        ({"overrides": "optimizer.clip_norm=null"}, {}, "clipping_scope", ("none", "global batch"), ""),
        ({"overrides": "optimizer.clip_norm=null"}, {}, "clipping", ("none", "norm 1"), ""),
        ({"overrides": "optimizer.clip_norm=0.5"}, {}, "clipping", ("norm 0.5", "norm 1"), ""),
        (
            {"overrides": "evaluation.metric=loss evaluation.goal=min evaluation.every_steps=50"},
            {"overrides": "evaluation.keep_best=true evaluation.patience=3"},
            "evaluation",
            ("loss min, every 50 steps", "accuracy max, every epoch, best kept, patience 3"),
            "",
        ),
        (
            {"overrides": "schedule=cosine schedule.warmup_share=0.025"},
            {},
            "schedule",
            ("cosine, warm-up over 2.5% of the samples", "linear, warm-up over 10% of the samples"),
            "",
        ),
        (
            {"overrides": "optimizer.betas=[0.9,0.95] optimizer.eps=1e-6 optimizer.weight_decay=0.1"},
            {},
            "optimizer",
            (
                "adamw, betas [0.9, 0.95], eps 1e-06, decay 0.1",
                "adamw, betas [0.9, 0.999], eps 1e-08, decay 0.01",
            ),
            "",
        ),
        (
            {"overrides": "optimizer=sgd optimizer.nesterov=true"},
            {"overrides": "optimizer=sgd optimizer.momentum=0.8"},
            "optimizer",
            ("sgd, momentum 0.9, nesterov, decay 0", "sgd, momentum 0.8, decay 0"),
            "",
        ),
        (
            {"workers": 2, "overrides": "accumulation.steps=3 batch.length_sorted=false"},
            {},
            "dropout",
            ("2 × 3 unsorted shares, cpu", "1 × 1 sorted shares, cpu"),
            "",
        ),
        ({**EXACT, "device_type": "cuda"}, {}, "dropout", ("by sample", "1 × 1 sorted shares, cpu"), ""),
        (
            {"overrides": "device.length_buckets=[16,32]"},
            {},
            "dropout",
            ("1 × 1 sorted shares, padded to [16, 32], cpu", "1 × 1 sorted shares, cpu"),
            "",
        ),
        ({"has_dropout": False}, EXACT, "dropout", ("none in the model", "by sample"), ""),
        (
            {"versions": {"python": "3.12.1", "torch": "2.13.0"}},
            {},
            "versions",
            ("python 3.12.1, torch 2.13.0", "python 3.11.9, torch 2.13.0"),
            "",
        ),
    ],
)
def test_values_and_change(
    changes: dict[str, Any], baseline: dict[str, Any], name: str, values: tuple[Any, Any], change: str
) -> None:
    """A property is shown in words that tell its values apart, and by how much it differs where it is a number."""
    item = found(certify(setup(**changes), setup(**baseline)), name)
    assert not item.equal
    assert (item.value, item.baseline) == values
    assert item.change == change


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ("optimizer=adamw", "optimizer=sgd optimizer.lr=1e-3"),
        ("optimizer.betas=[0.9,0.95]", ""),
        ("optimizer.eps=1e-6", ""),
        ("optimizer.weight_decay=0", ""),
        ("optimizer=sgd optimizer.momentum=0.8", "optimizer=sgd"),
        ("optimizer=sgd optimizer.nesterov=true", "optimizer=sgd"),
    ],
)
def test_every_setting_of_the_optimizer_counts(setting: str, other: str) -> None:
    """Another optimizer, and any of its settings but learning rate and clipping, is another rule of updating."""
    certificate = certify(setup(setting), setup(other))
    assert "optimizer" in different(certificate)
    assert certificate.level == NOT_COMPARABLE


def test_every_split_has_a_dropout_of_its_own() -> None:
    """Workers and micro-batches draw other numbers than one worker with whole batches, and than each other."""
    splits = [(1, 1), (1, 4), (4, 1), (2, 2)]

    def streams(equivalence: str) -> set[str]:
        setups = [setup(f"equivalence={equivalence} accumulation.steps={steps}", n) for n, steps in splits]
        return {found(certify(one, one), "dropout").value for one in setups}

    assert len(streams("standard")) == 4
    assert len(streams("exact")) == 1


def test_exact_dropout_does_not_follow_the_padding() -> None:
    """Other buckets drop other units from a worker's own stream, and the same ones where the sample decides."""
    for mode, level in (("exact", EQUIVALENT), ("standard", COMPARABLE)):
        one, other = (setup(f"equivalence={mode} device.length_buckets={of}") for of in ("[16,32]", "[32]"))
        assert certify(one, other).level == level


def test_a_model_without_dropout_has_none_to_differ_in() -> None:
    """Split, device and kind of dropout make no difference where nothing is dropped."""
    dry: dict[str, Any] = {"has_dropout": False}
    for changes in ({"workers": 4}, {"overrides": "accumulation.steps=4"}, {"device_type": "cuda"}, EXACT):
        certificate = certify(setup(**dry, **changes), setup(**dry))
        assert found(certificate, "dropout").equal
        assert certificate.level == EQUIVALENT


def test_differences_say_what_they_do_and_equalities_do_not() -> None:
    """A difference has an effect in words; what is equal has neither effect nor change, and equal values."""
    certificate = certify(setup("sync.k=4 precision=bf16", workers=2), setup())
    assert different(certificate) == {
        *("world_size", "dropout", "precision"),
        *("sync", "loss_normalisation", "clipping_scope"),
    }
    for item in certificate.properties:
        assert bool(item.effect) is not item.equal
        if item.equal:
            assert item.value == item.baseline
            assert item.change == ""
    effects = [row.effect for row in _ROWS if row.name not in ("world_size", "accumulation_steps")]
    assert len(set(effects)) == len(effects)


def test_certificate_json() -> None:
    """certificate.json has the level, and every property once with all that is known of it: as equal, or different."""
    certificate = certify(setup(workers=4), setup())
    content = json.loads(json.dumps(certificate.as_json()))
    assert set(content) == {"level", "equal", "different"}
    assert content["level"] == COMPARABLE
    assert [item["name"] for item in content["different"]] == ["dropout", "world_size"]
    assert content["different"][1] == {
        "name": "world_size",
        "value": 4,
        "baseline": 1,
        "equal": False,
        "allows": EQUIVALENT,
        "change": "× 4",
        "effect": "sums in another order: last bits",
    }
    names = [item["name"] for part in ("equal", "different") for item in content[part]]
    assert sorted(names) == sorted(row.name for row in _ROWS)
    assert all(item["equal"] is (part == "equal") for part in ("equal", "different") for item in content[part])


@pytest.mark.parametrize(("seen", "change"), [(2880, "× 0.5"), (48, "× 0.008333"), (5712, "× 0.9917")])
def test_a_run_that_stopped_early_is_not_comparable(seen: int, change: str) -> None:
    """A run that ended before its plan has seen other samples than its baseline; all else stays as it was."""
    planned = certify(setup(workers=4), setup())
    stopped = after_stopping(planned, seen)
    assert stopped.level == NOT_COMPARABLE
    item = found(stopped, "samples_seen")
    assert (item.value, item.baseline, item.equal, item.change) == (seen, 5760, False, change)
    assert "stopped" in item.effect
    assert different(stopped) == different(planned) | {"samples_seen"}
    assert [p for p in stopped.properties if p.name != "samples_seen"] == [
        p for p in planned.properties if p.name != "samples_seen"
    ]


# --- from the command line ------------------------------------------------------------------------------------


def prepared(overrides: str) -> Experiment:
    return prepare(settings(compose(overrides.split())))


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize(
    ("overrides", "level", "names"),
    [
        ("device=cpu", EQUIVALENT, ""),
        ("device=cpu batch.global_batch=96", EQUIVALENT, ""),  # the baseline keeps the run's global batch
        ("device=cpu scaling=none optimizer.lr=3e-4 seed=3 epochs=2", EQUIVALENT, ""),  # and its recipe and seed
        ("device=cpu max_steps=10", EQUIVALENT, ""),
        ("device=cpu schedule=cosine optimizer=sgd batch.drop_last=true", EQUIVALENT, ""),
        ("device=gpu", EQUIVALENT, "rehearsed"),
        ("setup=k4 device=cpu", EQUIVALENT, ""),
        ("device=cpu equivalence=exact", EQUIVALENT, ""),  # its baseline has exact dropout as well
        ("device=cpu8 equivalence=exact accumulation.steps=3", EQUIVALENT, "world_size accumulation_steps"),
        ("device=tpu8 equivalence=exact", EQUIVALENT, "world_size rehearsed"),
        ("device=cpu accumulation.steps=2", COMPARABLE, "accumulation_steps dropout"),
        ("device=cpu4", COMPARABLE, "world_size dropout"),
        (
            "device=tpu8 sync.k=4",
            COMPARABLE,
            "world_size dropout sync loss_normalisation clipping_scope rehearsed",
        ),
        (
            "device=cpu2 sync.k=4 optimizer.clip_norm=null equivalence=exact",
            COMPARABLE,
            "world_size sync loss_normalisation",
        ),
        ("device=cpu precision=bf16", COMPARABLE, "precision"),
        ("device=cpu compile=true gradient_checkpointing=true", COMPARABLE, "compile gradient_checkpointing"),
        ("device=cpu4 recipe.model.dropout=0", EQUIVALENT, "world_size"),  # attention dropout is 0 as it is
        ("device=cpu4 recipe.model.attention_dropout=0.1 recipe.model.dropout=0", COMPARABLE, "world_size dropout"),
        (
            "device=cpu2 recipe=linear batch=fixed_global",
            EQUIVALENT,
            "world_size",
        ),
        ("device=cpu batch=per_device", EQUIVALENT, ""),
        ("device=cpu4 batch=per_device", COMPARABLE, "world_size dropout global_batch data_order learning_rate"),
        (
            "device=cpu batch=per_device accumulation.steps=2 scaling=none",
            COMPARABLE,
            "accumulation_steps dropout global_batch data_order",
        ),
        ("device=cpu4 scaling.batch=replica_batch", COMPARABLE, "world_size dropout learning_rate"),
        (
            "device=cpu2 max_steps=7 batch=per_device",
            COMPARABLE,
            "world_size dropout global_batch data_order learning_rate",
        ),
    ],
)
def test_levels_of_real_setups(overrides: str, level: str, names: str) -> None:
    """From the command line: each setup gets the level and the differences that follow from what it changes."""
    certificate = prepared(overrides).certificate
    assert certificate.level == level
    assert different(certificate) == set(names.split())


@pytest.mark.usefixtures("_no_gpu")
def test_baseline_per_device_keeps_the_micro_batch() -> None:
    """Under batch=per_device four workers of 32 are compared with one worker of 32, at a quarter of the rate."""
    certificate = prepared("batch=per_device device=cpu4 scaling.reference_batch=32").certificate
    assert (found(certificate, "global_batch").value, found(certificate, "global_batch").baseline) == (128, 32)
    rate = found(certificate, "learning_rate")
    assert (rate.value, rate.baseline) == pytest.approx((4e-3, 1e-3))
    assert rate.change == "× 4"
    assert (found(certificate, "samples_seen").value, found(certificate, "samples_seen").baseline) == (48_000, 48_000)


@pytest.mark.usefixtures("_no_gpu")
def test_versions_of_a_run_are_those_installed() -> None:
    """A run's certificate names the libraries that it runs with, Python's own version first."""
    value = found(prepared("device=cpu").certificate, "versions").value
    assert value.startswith("python 3.")
    assert f"torch {torch.__version__.partition('+')[0]}" in value
    assert [part.split()[0] for part in value.split(", ")] == [*library_versions("cpu")]
    assert {"torch", "transformers", "tokenizers", "datasets", "numpy"} < {*library_versions("cpu")}
    assert {*library_versions("cuda")} - {*library_versions("cpu")} == {"CUDA"}


@pytest.mark.parametrize("decides", ["evaluation.keep_best=true", "evaluation.patience=2", ""])
def test_the_least_improvement_counts_where_it_decides(decides: str) -> None:
    """It says which weights are kept and when a run ends, and nothing where nobody asks."""
    certificate = certify(setup(f"{decides} evaluation.min_delta=0.5"), setup(decides))
    assert different(certificate) == ({"evaluation"} if decides else set())
