"""Causes of a slow run, produced in real runs by workers that are slow or wrong, and the diagnosis of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner import cli
from runner.config.compose import compose, settings
from runner.launch.local import start_forkserver
from runner.plan.experiment import prepare
from runner.run.context import RunContext, SweepContext
from runner.run.job import run as run_job
from tests.faulty_recipes import LINK_S, ONCE_S, faulty
from tests.runs import QUICK, TRACKED, read, stored_runs, summary_of

pytestmark = pytest.mark.usefixtures("here")


def kinds(summary: dict[str, Any]) -> list[str]:
    return [one["kind"] for one in summary["diagnoses"]]


def diagnosis(summary: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = (one for one in summary["diagnoses"] if one["kind"] == kind)
    return dict(found)


def test_loader_without_sharding(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every worker reads everything. With `ledger=warn` the run ends, and this is the first diagnosis."""
    summary = summary_of(*faulty("NotSharded"), "device=cpu2", "ledger=warn", base=TRACKED)
    assert kinds(summary)[0] == "not dealt out"
    assert "all 100 samples" in summary["diagnosis"]
    assert (summary["speed"]["samples_per_epoch"], summary["speed"]["samples_per_epoch_planned"]) == (200, 100)
    assert f"diagnosis: {summary['diagnosis']}" in capsys.readouterr().out
    (found,) = stored_runs(here)
    assert found.data.tags["diagnosis"] == summary["diagnosis"]
    assert 0 <= summary["speed"]["waited_share"] < 1
    for name in ("padding_share", "tokens_per_s"):
        assert found.data.metrics[f"train/speed/{name}"] == summary["speed"][name]
    assert found.data.metrics["train/speed/peak_memory_bytes"] == max(summary["speed"]["peak_memory_bytes"])


def test_failed_run_has_a_diagnosis(capsys: pytest.CaptureFixture[str]) -> None:
    """By default such a run fails after the first step, whose samples are enough for the diagnosis."""
    summary = summary_of(*faulty("NotSharded"), "device=cpu2", code=cli.EXIT_FAILED)
    assert summary["status"] == "FAILED"
    assert "all 24 samples" in summary["diagnosis"]
    assert f"diagnosis: {summary['diagnosis']}" in capsys.readouterr().out


def test_slow_link() -> None:
    """Slow all-reduces: a larger `sync.k` is recommended."""
    summary = summary_of(*faulty("SlowAllReduce"), "device=cpu2", "epochs=26")
    assert summary["comm_s"] / summary["synchronisations"] > 0.9 * LINK_S
    (setting,) = diagnosis(summary, "communication")["settings"]
    k = int(setting.removeprefix("sync.k="))
    assert k > 1
    assert k & (k - 1) == 0


@pytest.mark.parametrize(("name", "kind"), [("SlowCollate", "data"), ("SlowOptimizer", "optimizer")])
def test_slow_part_of_a_step(name: str, kind: str) -> None:
    assert kind in kinds(summary_of(*faulty(name), "device=cpu"))


def test_slow_start_and_evaluation() -> None:
    summary = summary_of(*faulty("SlowStart"), "device=cpu", "max_steps=2", "evaluation.every_steps=1")
    assert summary["evaluation_s"] > 2 * ONCE_S
    assert {"start-up", "evaluation"} & set(kinds(summary))
    assert summary["speed"]["start_up_share"] == pytest.approx(summary["first_step_s"] / summary["wall_s"])


def test_computation() -> None:
    """Where the model takes nearly all of a step, no part of it is named."""
    summary = summary_of(*faulty("SlowLoss"), "device=cpu", "accumulation.steps=4")
    assert not {"data", "optimizer", "communication", "overhead", "padding"} & set(kinds(summary))
    assert summary["speed"]["step_share"]["forward"] > 0.5


def test_uneven_rows() -> None:
    """Every fourth sentence is four times as long: the recommended setting avoids padding, for the same operations."""
    uneven = ["recipe.data._target_=tests.faulty_recipes.UnevenCorpus", "trusted_packages=[tests]", "device=cpu"]
    padded = summary_of(*uneven, "recipe.padding=longest")
    assert diagnosis(padded, "padding")["settings"] == ["recipe.padding=none"]
    unpadded = summary_of(*uneven, "recipe.padding=none")
    assert (padded["speed"]["padding_share"] > 0.3, unpadded["speed"]["padding_share"]) == (True, 0)
    assert padded["speed"]["flops_per_sample"] == unpadded["speed"]["flops_per_sample"]


def test_a_run_whose_operations_cannot_be_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends as ever, with its model, and says why a figure is missing."""
    summary = summary_of(*faulty("LossInTrainingOnly"), "device=cpu", "max_steps=2")
    assert summary["speed"]["model_flops_utilization"] is None
    assert (here / "outputs" / "run-0" / "model" / "config.json").exists()
    assert "no loss outside of training" in capsys.readouterr().out


def test_baseline(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without a baseline says how to get one; with one it has its scaling efficiency."""
    alone = summary_of("device=cpu2")
    assert "setup=one" in capsys.readouterr().out
    assert alone["speed"]["scaling_efficiency"] is None
    one = summary_of("device=cpu2", "setup=one", "seed=1")
    two = summary_of("device=cpu2")
    assert (one["speed"]["baseline"], two["speed"]["baseline"]) == ("run-1", "run-1")
    assert one["speed"]["scaling_efficiency"] == 1
    assert two["speed"]["scaling_efficiency"] == pytest.approx(two["samples_per_s"] / (2 * one["samples_per_s"]))
    assert "speed/scaling_efficiency" in (here / "outputs/run-2/metrics.jsonl").read_text()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot restrict a process to a core")
def test_two_workers_on_one_core() -> None:
    start_forkserver()  # with all cores, for later tests
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        summary = summary_of("device=cpu2")
    finally:
        os.sched_setaffinity(0, cores)
    assert diagnosis(summary, "cores")["share"] == 0.5


def test_two_jobs_at_once(here: Path) -> None:
    experiment = prepare(settings(compose([*QUICK, "device=cpu", "max_steps=2"])))
    (here / "job").mkdir()
    summary = run_job(experiment, here / "job", RunContext(0.0, Console(), SweepContext(at_once=2))).summary
    assert "side by side" in kinds(summary)
    assert read(here / "job", "summary.json")["diagnoses"] == summary["diagnoses"]


def test_notes_of_a_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed before the plan, word for word, and kept in folder and store."""
    summary = summary_of(*faulty("WithNotes"), "device=cpu", "max_steps=1", base=TRACKED)
    printed = capsys.readouterr().out
    assert printed.index("note: weights of [x] are random") < printed.index("Plan ·") < printed.index("finished")
    assert summary["notes"] == ["weights of [x] are random", "timing only"]
    assert stored_runs(here)[0].data.tags["notes"] == "weights of [x] are random; timing only"
