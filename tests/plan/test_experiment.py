"""From settings to everything that is known before a worker starts."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

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
    same, others = ("", "seed=1 tracking=none verbose=true"), ("sync.k=2", "epochs=1", "batch.order=keyed")
    digests = [prepared(one).setup_digest for one in (*same, *others)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


@pytest.mark.parametrize(("max_steps", "has_effect"), [(19, True), (20, True), (21, False)])
def test_max_steps_beyond_the_epochs(max_steps: int, has_effect: bool) -> None:
    """960 samples are 20 steps."""
    experiment = prepared(f"epochs=1 max_steps={max_steps}")
    assert [f"max_steps={max_steps}" in note for note in experiment.notes] == [True] * (not has_effect)
    assert experiment.plan.optimizer_steps == min(max_steps, 20)


@pytest.mark.parametrize(
    ("overrides", "ratio"),
    [
        ("epochs=1", "0.69"),  # by samples 1 + (1 - 48 ÷ 50), by steps 1 + 1 ÷ 2
        ("epochs=3", "0.87"),
        ("epochs=3 batch.global_batch=25", None),
        ("epochs=3 batch.drop_last=true", None),
        ("epochs=3 recipe.data.train_samples=1000", None),
        ("epochs=1 max_steps=1", None),
        ("epochs=3 schedule=constant", None),
    ],
)
def test_a_schedule_unlike_one_by_steps(overrides: str, ratio: str | None) -> None:
    """50 samples in batches of 48: the second step of an epoch has the learning rate of its end."""
    notes = prepared(f"schedule.warmup_share=0 recipe.data.train_samples=50 {overrides}").notes
    assert [f"add up to {ratio} of" in note for note in notes if "add up" in note] == [True] * (ratio is not None)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="reads what instructions the processor has")
def test_bf16_without_instructions_for_it_is_noted() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    slow = platform.machine() == "x86_64" and "avx512bw" not in flags
    for precision, noted in (("bf16", slow), ("fp32", False)):
        notes = prepared(f"precision={precision}").notes
        assert any("many times slower" in note for note in notes) == noted


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


@pytest.mark.parametrize(
    ("overrides", "size", "level"),
    [
        ("device=cpu2 batch.global_batch=9000", 9000, "comparable"),
        ("device=cpu batch.global_batch=9000", 9000, "comparable"),
        ("device=cpu2 batch.global_batch=960", 960, "equivalent"),
    ],
)
def test_a_batch_larger_than_the_data(overrides: str, size: int, level: str) -> None:
    """A note, and a certificate whose baseline has a batch of the size of the data; nothing else differs by that."""
    experiment = prepared(f"{overrides} scaling=none recipe.model.dropout=0 recipe.model.attention_dropout=0")
    differing = {item.name: item for item in experiment.certificate.properties if not item.equal}
    assert experiment.certificate.level == level
    assert bool(experiment.notes) == ("global_batch" in differing) == (size > 960)
    assert set(differing) <= {"global_batch", "world_size"}
    if size > 960:
        assert (differing["global_batch"].value, differing["global_batch"].baseline) == (size, 960)
        assert "9,000" in experiment.notes[0]
