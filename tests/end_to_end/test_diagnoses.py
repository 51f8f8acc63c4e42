"""Each cause of a slow run, brought about in a real one: workers that are slow or wrong, and what is said of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from rich.console import Console

from runner import cli
from runner.config.compose import compose, settings
from runner.launch.elastic import start_forkserver
from runner.plan.experiment import prepare
from runner.run.job import run as run_job
from runner.run.summary import Role
from tests.replicas import TINY
from tests.slow_recipe import EVALUATION_SECONDS, SECONDS

#: Ten optimizer steps of 24 samples, in fp32; the evaluation part is evaluated twice.
QUICK = [override for override in TINY if not override.startswith(("tracking", "precision"))]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(name: str) -> list[str]:
    return [f"recipe._target_=tests.slow_recipe.{name}", "trusted_packages=[tests]"]


def run(root: Path, *overrides: str, code: int = 0) -> dict[str, Any]:
    """Run to the expected exit code; the content of `summary.json`."""
    folder = root / "outputs" / f"run-{len(list(root.glob('outputs/run-*')))}"
    assert cli.main([*QUICK, f"hydra.run.dir={folder}", *overrides], time.time()) == code
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def quiet(root: Path, *overrides: str, code: int = 0) -> dict[str, Any]:
    return run(root, "tracking=none", *overrides, code=code)


def kinds(summary: dict[str, Any]) -> list[str]:
    return [one["kind"] for one in summary["diagnoses"]]


def of(summary: dict[str, Any], kind: str) -> str:
    (sentence,) = (one["sentence"] for one in summary["diagnoses"] if one["kind"] == kind)
    return sentence


def run_of(root: Path) -> Any:
    client = MlflowClient(f"sqlite:///{root / 'outputs' / 'mlflow.db'}")
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return found


NOT_DEALT_OUT = "the data were not dealt out, so 2 workers did 2 times the work"


def test_a_loader_that_nobody_sharded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The puzzle: every worker reads everything. With `ledger=warn` the run ends, and says so above all else."""
    summary = run(here, *recipe("NotDealtOut"), "device=cpu2", "ledger=warn")
    assert summary["diagnosis"] == f"each worker read all 100 samples: {NOT_DEALT_OUT}"
    assert (summary["speed"]["samples_per_epoch"], summary["speed"]["samples_per_epoch_planned"]) == (200, 100)
    assert f"diagnosis: {summary['diagnosis']}" in capsys.readouterr().out
    found = run_of(here)
    assert found.data.tags["diagnosis"] == summary["diagnosis"]
    assert found.data.metrics["speed/padding_share"] == summary["speed"]["padding_share"]


def test_the_ledger_ends_such_a_run_and_its_reason_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default it fails after the first step; the summary has the reason all the same, from what was read so far."""
    summary = run(here, *recipe("NotDealtOut"), "device=cpu2", code=cli.EXIT_FAILED)
    assert summary["status"] == "FAILED"
    assert summary["diagnosis"] == f"each worker read all 24 samples of the steps that were done: {NOT_DEALT_OUT}"
    assert f"diagnosis: {summary['diagnosis']}" in capsys.readouterr().out
    assert run_of(here).data.tags["diagnosis"] == summary["diagnosis"]


def test_two_workers_with_one_share(here: Path) -> None:
    """Half of the data twice and half of them never is another mistake."""
    summary = quiet(here, *recipe("SameShare"), "device=cpu2", "ledger=warn")
    assert of(summary, "repeats").startswith("50 of 100 samples read were repeats within the epoch")


@pytest.mark.parametrize(("name", "kind"), [("SlowStart", "start-up"), ("SlowEnd", "ending")])
def test_a_run_that_is_mostly_something_else_than_training(here: Path, name: str, kind: str) -> None:
    """Two steps of a few milliseconds, and eight seconds before or after them."""
    summary = quiet(here, *recipe(name), "device=cpu", "max_steps=2")
    assert kind in kinds(summary)
    assert summary["speed"]["start_up_share"] == pytest.approx(summary["first_step_s"] / summary["wall_s"])


def test_what_a_recipe_has_to_say_about_itself(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said before the run, word for word, and kept with it."""
    summary = run(here, *recipe("Noted"), "device=cpu", "max_steps=1")
    said = capsys.readouterr().out
    assert said.index("note: weights of [x] are random") < said.index("Plan ·") < said.index("finished")
    assert summary["notes"] == ["weights of [x] are random", "timing only"]
    assert run_of(here).data.tags["notes"] == "weights of [x] are random; timing only"


def test_a_slow_link(here: Path) -> None:
    """Averages of gradients that take their time: a k is advised, and with it the same run has less of that."""
    slow = [*recipe("SlowLink"), "device=cpu2", "epochs=26"]
    summary = quiet(here, *slow)
    said = of(summary, "communication")
    assert "of a step at this link speed (" in said
    assert summary["comm_s"] / summary["synchronisations"] > 0.9 * SECONDS
    k = int(said.partition("sync.k=")[2].split()[0])
    assert k > 1
    assert k & (k - 1) == 0
    less = quiet(here, *slow, f"sync.k={k}")
    assert less["comm_s"] < summary["comm_s"]


def test_a_slow_link_between_local_phases(here: Path) -> None:
    """The same of averages of weights, every second step; within four steps no k is long enough to hide them."""
    summary = quiet(here, *recipe("SlowLink"), "device=cpu2", "sync.k=2", "max_steps=4")
    assert "; no sync.k up to this run's 4 steps" in of(summary, "communication")


@pytest.mark.parametrize(
    ("name", "kind"), [("SlowCollate", "data"), ("SlowOptimizer", "optimizer"), ("SlowDisk", "overhead")]
)
def test_a_slow_part_of_a_step(here: Path, name: str, kind: str) -> None:
    """What is slow in each step is named."""
    assert kind in kinds(quiet(here, *recipe(name), "device=cpu"))


def test_a_slow_evaluation(here: Path) -> None:
    """Twelve evaluations that take their time."""
    summary = quiet(here, *recipe("SlowEvaluation"), "device=cpu", "epochs=12")
    assert summary["evaluation_s"] > 12 * EVALUATION_SECONDS
    assert "evaluation" in kinds(summary)


def test_rows_of_very_different_length(here: Path) -> None:
    """Every fourth sentence is four times as long; the advice is the mend: with it there is less padding."""
    uneven = [*recipe("OneThread"), "recipe.data._target_=tests.slow_recipe.UnevenCorpus", "device=cpu"]
    summary = quiet(here, *uneven, "batch.length_sorted=false")
    mend = "batch.length_sorted=true and smaller micro-batches (more accumulation.steps) would hold samples of like "
    assert of(summary, "padding").endswith(f"{mend}length")
    less = quiet(here, *uneven, "accumulation.steps=4")
    assert less["speed"]["padding_share"] < summary["speed"]["padding_share"] / 2


def test_rows_padded_to_one_length(here: Path) -> None:
    """Sentences of at most 14 tokens in rows of 32."""
    summary = quiet(here, *recipe("OneThread"), "++recipe.padding=max_length", "device=cpu")
    mend = "recipe.padding=max_length makes every row as long, and recipe.padding=longest follows the batch"
    assert of(summary, "padding").endswith(mend)
    assert summary["speed"]["padding_share"] > 0.5
    tokens = summary["speed"]["tokens"]
    assert sum(tokens.values()) == 2 * 100 * 32


def test_a_baseline_beside_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without one says how to get it; with one it has its efficiency, and a slower way of one worker a reason."""
    alone = quiet(here, *recipe("OneThread"), "device=cpu2")
    assert "setup=one with all but workers and accumulation as here makes one" in capsys.readouterr().out
    assert alone["speed"]["scaling_efficiency"] is None
    one = quiet(here, *recipe("OneThread"), "device=cpu2", "setup=one", "seed=1")
    two = quiet(here, *recipe("OneThread"), "device=cpu2")
    assert (one["speed"]["baseline"], two["speed"]["baseline"]) == ("run-1", "run-1")
    assert one["speed"]["scaling_efficiency"] == 1
    assert two["speed"]["scaling_efficiency"] == pytest.approx(two["samples_per_s"] / (2 * one["samples_per_s"]))
    assert f"scaling efficiency {two['speed']['scaling_efficiency']:.0%}: " in capsys.readouterr().out
    metrics = [json.loads(line) for line in (here / "outputs/run-2/metrics.jsonl").read_text().splitlines()]
    (logged,) = (metric for metric in metrics if metric["key"] == "speed/scaling_efficiency")
    assert (logged["value"], logged["step"]) == (two["speed"]["scaling_efficiency"], 10)

    small = quiet(here, *recipe("OneThread"), "device=cpu", "accumulation.steps=24")
    assert "in run-1: micro-batches of 1 instead of 24 samples fill the device less" in of(small, "micro-batch")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no such call")
def test_workers_that_share_a_core(here: Path) -> None:
    """Two workers on a machine that gives them one core."""
    start_forkserver()  # with all cores, for the tests after this one
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        summary = quiet(here, "device=cpu2")
    finally:
        os.sched_setaffinity(0, cores)
    assert of(summary, "cores") == (
        "2 workers share 1 core: each trains with one thread, and more of them cannot be faster here"
    )


def test_a_rehearsal(here: Path) -> None:
    """The first thing that is said of its speed is that it is another's."""
    summary = quiet(here, "device=tpu8", "device.workers=2")
    assert kinds(summary)[0] == "rehearsed"
    said = "this was a rehearsal of tpu2 on other hardware: its speed says nothing about tpu2"
    assert summary["diagnosis"] == said
    assert summary["speed"]["scaling_efficiency"] is None


def test_a_run_in_company(here: Path) -> None:
    """A job that is told of another beside it has the threads of half a machine, and says so."""
    experiment = prepare(settings(compose([*QUICK, "tracking=none", "device=cpu"])))
    (here / "job").mkdir()
    summary, _ = run_job(experiment, here / "job", time.time(), Console(), Role(at_once=2))
    assert "side by side" in kinds(summary)
    assert json.loads((here / "job" / "summary.json").read_text())["diagnoses"] == summary["diagnoses"]


def test_a_run_that_computes(here: Path) -> None:
    """Where the model takes nearly all of a step no part of it is named, nor what could be said of several workers."""
    summary = quiet(here, *recipe("SlowModel"), "device=cpu", "accumulation.steps=6", "epochs=6")
    assert set(kinds(summary)) <= {"nothing", "start-up", "ending"}
    assert summary["speed"]["step_share"]["forward"] > 0.5
    assert summary["speed"]["padding_share"] < 0.2
