"""Measuring real workers of the tiny recipe, and runs that score what was predicted from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import cli
from runner.config.choices import SyncSchedule
from runner.measure.measuring import _evaluations, _for_measuring, _groups
from runner.measure.store import load, measurement_path
from runner.measure.worker import GivenSteps
from runner.plan.experiment import Experiment, prepare
from tests.configured import configured
from tests.plan.test_order import plan, steps_of
from tests.replicas import TINY
from tests.runs import QUICK, TRACKED, stored_runs, summary_of

SETTINGS = [override for override in TINY if not override.startswith("precision")]


def experiment(*overrides: str) -> Experiment:
    return prepare(configured([*SETTINGS, *overrides]))


def path(*overrides: str) -> Path:
    return measurement_path(experiment(*overrides))


@pytest.mark.parametrize("override", ["optimizer.lr=0.1", "recipe.data.train_samples=50", "batch.global_batch=48"])
def test_what_one_measurement_serves(override: str) -> None:
    assert path(override) == path()


@pytest.mark.parametrize("override", ["precision=bf16", "device.length_buckets=[16]", "device.workers=2"])
def test_what_is_measured_anew(override: str) -> None:
    assert path(override) != path()


def test_other_threads_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As jobs have that share the machine."""
    monkeypatch.setattr("runner.measure.store.threads_per_worker", lambda workers, given: 4 // workers)
    assert measurement_path(experiment(), at_once=2) != path()


def test_ways_to_synchronise_are_measured_separately() -> None:
    assert path("device=cpu2", "sync.k=2") == path("device=cpu2", "sync.k=4") != path("device=cpu2")
    assert path("device=cpu2", "sync.k=2", "sync.compress=bf16") != path("device=cpu2", "sync.k=2")
    assert path("device=cpu2", "sync.k=2", "sync.overlap=true") != path("device=cpu2", "sync.k=2")
    assert path("sync.k=4") == path(), "one worker does not synchronise"


def test_rows_of_a_measurement() -> None:
    """Few and many rows, short and long ones, and a step of two micro-batches, in every round."""
    lengths = np.arange(1, 101)
    groups = _groups(lengths, (4, 16), np.random.default_rng(0))
    sizes = {tuple(map(len, step)) for group in groups for step in group}
    assert sizes == {(4,), (16,), (4, 4)}
    means = [lengths[step[0]].mean() for group in groups for step in group]
    assert min(means) < 30
    assert max(means) > 85
    assert [rows for rows in _evaluations(lengths, 8, 2) if len(rows) > 16] == []


def test_all_workers_train_on_the_given_rows() -> None:
    given = [[[3, 1], [2]], [[0]]]
    order = GivenSteps(plan(world_size=2), 0, 1, given)
    steps = steps_of(order)
    assert [(step.t, step.samples) for step in steps] == [(0, 6), (1, 2)]
    assert [rows.tolist() for rows in order.micro_batches(0, steps[0])] == given[0]
    assert sorted(order.ids(0, 0, steps[0].stop).tolist()) == [1, 1, 2, 2, 3, 3]
    order.advance()
    assert (order.epoch, order.t) == (0, 1)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"cache_dir={tmp_path_factory.mktemp('measured')}"


@pytest.mark.parametrize(
    "setup",
    [
        ["device=cpu"],
        ["device=cpu2", "sharding=fsdp"],
        ["device=cpu2", "sync.k=2", "accumulation.steps=2"],
    ],
)
def test_a_run_scores_its_prediction(
    setup: list[str], cache_dir: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`measure=true` measures once; later plans and runs use it. Without it nothing is predicted."""
    monkeypatch.setenv("COLUMNS", "140")
    arguments = [*QUICK, cache_dir, *setup]
    assert cli.run_tool("plan", arguments) == 0
    assert "measure=true" in capsys.readouterr().out
    unmeasured = summary_of(cache_dir, *setup)
    assert unmeasured["prediction"] is None
    assert cli.run_tool("plan", [*arguments, "measure=true", "plan.price_per_hour=3600"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("training", "in total", "peak memory", "fits", "3600 per hour"))
    measurement = load(experiment("precision=fp32", cache_dir, *setup))
    assert measurement is not None
    assert measurement.steps == 20
    assert (measurement.synchronisation_s > 0) is ("sync.k=2" in setup)
    monkeypatch.setattr("runner.measure.predicted.measure", _not_again)
    assert cli.run_tool("plan", [*arguments, "measure=true"]) == 0
    capsys.readouterr()
    summary = summary_of(cache_dir, *setup)
    assert "predicted were" in capsys.readouterr().out
    _check(summary["prediction"], summary)


@pytest.mark.parametrize(
    "overrides",
    [
        ["device=cpu2", "sync.k=3", "sync.schedule=post_local", "sync.synchronous_share=0.3"],
        ["device=cpu", "sync.k=4", "sync.fragments=4", "sync.schedule=qsr", "sync.qsr_alpha=1"],
        ["device=cpu2", "sync.k=4", "sync.schedule=qsr", "sync.overlap=true", "sync.delay=3"],
    ],
)
def test_any_schedule_can_be_measured(overrides: list[str]) -> None:
    """As local phases of two steps, whose settings are valid."""
    sync = _for_measuring(configured(["recipe=acceptability", *overrides])).sync
    assert (sync.k, sync.schedule, sync.fragments) == (2, SyncSchedule.constant, 1)


def _not_again(*_: Any) -> None:
    raise AssertionError("measured again")


def _check(prediction: dict[str, Any], summary: dict[str, Any]) -> None:
    training = prediction["training_s"]
    assert training["measured"] == pytest.approx(summary["samples_seen"] / summary["samples_per_s"])
    assert training["interval"][0] < training["predicted"] < training["interval"][1]
    assert training["error"] == pytest.approx(training["predicted"] / training["measured"] - 1)
    assert prediction["wall_s"]["measured"] == summary["wall_s"]
    assert prediction["peak_memory_bytes"]["measured"] == max(summary["speed"]["peak_memory_bytes"])
    # Other tests share the cores, so only what does not depend on them is close.
    assert abs(prediction["peak_memory_bytes"]["error"]) < 0.2


def test_scores_are_logged(cache_dir: str, here: Path) -> None:
    arguments = [*TRACKED, cache_dir, "device=cpu"]
    assert cli.run_tool("plan", [*arguments, "measure=true"]) == 0
    summary = summary_of(cache_dir, "device=cpu", base=TRACKED)
    (run,) = stored_runs(here)
    scores = summary["prediction"]
    assert run.data.metrics["train/prediction/training_s"] == scores["training_s"]["predicted"]
    assert run.data.metrics["train/prediction/training_error"] == scores["training_s"]["error"]
    assert json.dumps(scores)
