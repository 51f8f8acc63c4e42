"""From settings to everything that is known before a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner.config.compose import compose, settings
from runner.errors import UserError
from runner.plan.experiment import Experiment, prepare


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def prepared(overrides: str) -> Experiment:
    return prepare(settings(compose(overrides.split())))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("device=cpu", "cpu · s0"),
        ("device=cpu4 seed=3", "cpu4 · s3"),
        ("device=cpu4 sync.k=4 precision=bf16 seed=1", "cpu4 · k=4 · bf16 · s1"),
        ("device=tpu8 accumulation.steps=2 sync.k=8", "tpu8 · acc=2 · k=8 · s0"),
        ("device=cpu2 accumulation=auto accumulation.max_micro_batch=6", "cpu2 · acc=4 · s0"),
        ("device=gpu2 precision=fp64", "gpu2 · fp64 · s0"),
        ("device=cpu device.workers=3", "cpu3 · s0"),
    ],
)
def test_setup_name(overrides: str, name: str) -> None:
    """A setup is named by what is unusual about it, and its seed."""
    assert prepared(overrides).setup_name == name


@pytest.mark.parametrize(
    ("metric", "answer"),
    [("acuracy", "did you mean 'accuracy'?"), ("macro_f1", "there are: accuracy, loss, matthews")],
)
def test_metric_that_the_recipe_does_not_compute(metric: str, answer: str) -> None:
    """A metric that is misspelt, or not shown, is refused with the recipe and those that it computes."""
    with pytest.raises(UserError) as caught:
        prepared(f"evaluation.metric={metric}")
    message = str(caught.value)
    assert message.startswith(f"evaluation.metric={metric} is not computed by recipe=acceptability; ")
    assert message.endswith(answer)


@pytest.mark.parametrize("metric", ["accuracy", "matthews", "loss"])
def test_metric_that_it_computes(metric: str) -> None:
    """The metrics shown can all decide about the best weights, and so can the loss."""
    goal = "min" if metric == "loss" else "max"
    wrong = "max" if metric == "loss" else "min"
    experiment = prepared(f"evaluation.metric={metric} evaluation.goal={goal}")
    assert experiment.config.evaluation.metric == metric
    with pytest.raises(UserError, match=f"evaluation.goal={wrong} is wrong .* set evaluation.goal={goal}"):
        prepared(f"evaluation.metric={metric} evaluation.goal={wrong}")


@pytest.mark.parametrize("batch", ["batch=fixed_global", "batch=per_device"])
@pytest.mark.parametrize("max_steps", [1, 166, 167, 168, 400, 501, 510, 1000, 5000])
def test_one_worker_is_its_own_baseline(batch: str, max_steps: int) -> None:
    """A run cut short anywhere, also after several epochs with a tail, has a baseline that sees as many samples."""
    assert prepared(f"device=cpu {batch} max_steps={max_steps}").certificate.level == "equivalent"


@pytest.mark.parametrize(
    ("every_steps", "k", "near"), [(6, 4, "4 or 8"), (3, 4, "4"), (9, 8, "8 or 16"), (7, 2, "6 or 8")]
)
def test_evaluation_between_synchronisations(every_steps: int, k: int, near: str) -> None:
    """Evaluations that would fall between two synchronisations are refused with the nearest steps that do not."""
    with pytest.raises(UserError) as caught:
        prepared(f"device=cpu2 evaluation.every_steps={every_steps} sync.k={k}")
    message = str(caught.value)
    assert message.startswith(f"evaluation.every_steps={every_steps} is no multiple of sync.k={k}")
    assert message.endswith(f"use {near}")


@pytest.mark.parametrize("overrides", ["evaluation.every_steps=8 sync.k=4", "evaluation.every_steps=7", "sync.k=5"])
def test_evaluation_right_after_a_synchronisation(overrides: str) -> None:
    """Multiples of k, every step count where k is 1, and evaluating once an epoch are all allowed."""
    assert prepared(f"device=cpu2 {overrides}").plan.optimizer_steps > 0


def test_one_worker_may_evaluate_after_any_step() -> None:
    """One worker has nobody to wait for, whatever k says."""
    assert prepared("device=cpu evaluation.every_steps=3 sync.k=4").plan.k == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("device=cpu4 batch.global_batch=50", r"^batch\.global_batch=50 .* 48 and 52$"),
        ("device=cpu8 batch.global_batch=8 accumulation.steps=2", r"^batch\.global_batch=8 .* 16"),
        ("batch=per_device accumulation=auto", "^accumulation=auto cannot be combined with batch=per_device"),
        ("recipe.data.train_samples=20 batch.drop_last=true", r"^batch\.drop_last=true drops everything: .*48.* 20 "),
        ("recipe.model.hidden_size=100", r"^recipe\.model\.hidden_size=100 .*recipe\.model\.heads=8"),
        ("recipe.data.train_samples=1", r"^recipe\.data\.train_samples=1 "),
        ("recipe.metrics_shown=[acc]", "^recipe.metrics_shown has no metric 'acc'; did you mean 'accuracy'"),
        ("recipe._target_=os.system", r"^recipe\._target_=os\.system is outside the trusted packages"),
    ],
)
def test_what_is_found_before_anything_starts(overrides: str, message: str) -> None:
    """Sizes, devices, data and model are all checked while preparing, each in one sentence that names the setting."""
    with pytest.raises(UserError, match=message) as caught:
        prepared(overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "recipe.data.train_samples=many",  # TypeError
        "recipe.data.train_samples=10.5",  # TypeError
        "recipe.data.train_samples=null",  # TypeError
        "recipe.model.layers=two",  # TypeError
        "recipe.model.dropout=high",  # TypeError
        "recipe.data=null",  # AttributeError
        "recipe.model=bert",  # AttributeError
        "recipe.data.seed=abc",  # accepted
        "recipe.model.layers=1.5",  # accepted
        "recipe.model.attention_dropout=5",  # accepted
    ],
)
def test_wrong_types_inside_a_recipe(override: str) -> None:
    """A recipe's own settings are checked for their types too."""
    with pytest.raises(UserError, match=f"^{override.partition('=')[0]}"):
        prepared(override)


def test_preparing_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing leaves nothing behind: no output folder, no cache, no store."""
    monkeypatch.chdir(tmp_path)
    prepared("device=cpu4 cache_dir=cache")
    assert list(tmp_path.iterdir()) == []


def test_facts_reach_the_plan() -> None:
    """The plan counts the recipe's own training samples."""
    experiment = prepared("device=cpu recipe.data.train_samples=100 recipe.data.eval_samples=20 epochs=3")
    assert (experiment.facts.train_samples, experiment.facts.eval_samples) == (100, 20)
    assert (experiment.plan.samples_per_epoch, experiment.plan.total_samples) == (100, 300)
    assert experiment.plan.optimizer_steps == 9  # 48 + 48 + 4, three times


def test_facts_tell_data_apart() -> None:
    """Other data have another digest, and the training seed is none of their business."""
    digests = {
        overrides: prepared(
            f"device=cpu recipe.data.train_samples=40 recipe.data.eval_samples=10 {overrides}"
        ).facts.digest
        for overrides in ("", "seed=5", "recipe.data.seed=1", "recipe.data.eval_samples=12")
    }
    assert digests[""] == digests["seed=5"]
    assert len(set(digests.values())) == 3
