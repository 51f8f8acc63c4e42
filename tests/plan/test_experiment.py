"""From settings to everything that is known before a worker starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from runner.errors import UserError
from tests.configured import prepared


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("device=cpu", "cpu · s0"),
        ("device=cpu4 sync.k=4 precision=bf16 seed=1", "cpu4 · k=4 · bf16 · s1"),
        ("device=tpu8 accumulation.steps=2 sync.k=8", "tpu8 · acc=2 · k=8 · s0"),
        ("device=cpu2 accumulation=auto accumulation.max_micro_batch=6", "cpu2 · acc=4 · s0"),
        ("device=cpu device.workers=3", "cpu3 · s0"),
        ("device=cpu sync.k=4", "cpu · k=4 · s0"),
    ],
)
def test_setup_name(overrides: str, name: str) -> None:
    assert prepared(overrides).setup_name == name


def test_the_setup_digest_ignores_the_seed_and_where_a_run_is_logged() -> None:
    digests = [prepared(one).setup_digest for one in ("", "seed=1 tracking=none", "sync.k=2", "epochs=1")]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_facts_reach_the_plan() -> None:
    experiment = prepared("recipe.data.train_samples=100 recipe.data.eval_samples=20 epochs=3")
    assert (experiment.facts.train_samples, experiment.facts.eval_samples) == (100, 20)
    assert (experiment.plan.total_samples, experiment.plan.optimizer_steps) == (300, 9)  # 48 + 48 + 4, three times


def test_facts_tell_data_apart() -> None:
    """Other data have another digest; the training seed does not matter."""
    digests = [
        prepared(one).facts.digest for one in ("", "seed=5", "recipe.data.seed=1", "recipe.data.eval_samples=12")
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_preparing_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepared("device=cpu4 cache_dir=cache")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("device=cpu4 batch.global_batch=50", "batch.global_batch=50 "),
        ("device=cpu2 sync.k=4 evaluation.every_steps=6", "evaluation.every_steps=6 .* 4 or 8"),
        ("device=cpu2 sync.k=4 evaluation.every_steps=3", "evaluation.every_steps=3 .* 4$"),
        ("device=cpu2 max_steps=30 sync.k=31", "sync.k=31 .* sync.k=30 or less"),
        ("device=cpu2 max_steps=30 sync.k=16 sync.schedule=post_local", "sync.k=16 .* sync.k=15 or less"),
        ("evaluation.metric=acuracy", "evaluation.metric=acuracy .* did you mean .*'accuracy'"),
        ("evaluation.metric=loss evaluation.goal=max", "evaluation.goal=max .* evaluation.goal=min"),
        ("evaluation.goal=min", "evaluation.goal=min .* evaluation.goal=max"),
        ("recipe.name=a/b", "recipe.name=a/b .*slashes"),
        ("recipe.metric=null evaluation.metric=loss", "recipe.metric "),
        ("recipe.tuned.lrr=1", "there is no setting 'recipe.tuned.lrr'"),
        ("recipe.model.hidden_size=100", "recipe.model.hidden_size=100 .*recipe.model.heads=8"),
        ("recipe.metrics_shown=[acc]", "recipe.metrics_shown.*did you mean .*'accuracy'"),
        ("recipe._target_=os.system", "recipe._target_=os.system .*trusted"),
        ("device=tpu8 precision=fp16", "precision=fp16 "),
    ],
)
def test_what_is_found_before_anything_starts(overrides: str, message: str) -> None:
    """Sizes, device, data, metric and model are checked; the error is one sentence that names the setting."""
    pattern = "^" + re.escape(message).replace(r"\ \.\*", " .*").replace(r"\.\*", ".*").replace(r"\$", "$")
    with pytest.raises(UserError, match=pattern) as caught:
        prepared(overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "device=cpu2 evaluation.every_steps=8 sync.k=4",
        "device=cpu2 sync.k=5",
        "device=cpu evaluation.every_steps=3 sync.k=4",  # one worker is always synchronous
        "device=cpu max_steps=30 sync.k=31",
        "device=cpu2 max_steps=30 sync.k=30",
        "device=cpu2 evaluation.every_steps=6 sync.k=4 sync.schedule=qsr",
    ],
)
def test_intervals_that_fit(overrides: str) -> None:
    assert prepared(overrides).plan.optimizer_steps > 0
