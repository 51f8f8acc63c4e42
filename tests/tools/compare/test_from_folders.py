"""Runs read from folders of the runner: complete, older, damaged and unfinished."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.errors import UserError
from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.from_folders import read_folders, run_folders
from runner.tools.compare.runs import FoundRuns


def read(*folders: Path, metric: str | None = None) -> FoundRuns:
    return read_folders([(folder.name, folder) for folder in folders], metric)


def change(folder: Path, name: str, **values: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    path = folder / name
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_run_folders(sweep_folder: Path, tmp_path: Path) -> None:
    """The jobs of a sweep in order, a run's own folder, and folders sorted by number; others are refused."""
    assert [folder.name for folder in run_folders(sweep_folder)] == ["0", "1", "2", "3"]
    assert run_folders(sweep_folder / "2") == [sweep_folder / "2"]
    with pytest.raises(UserError, match="holds no run"):
        run_folders(tmp_path)
    for number in (10, 9, 1):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.yaml").touch()
    assert [folder.name for folder in run_folders(tmp_path)] == ["1", "9", "10"]
    (tmp_path / "x.csv").touch()
    with pytest.raises(UserError, match="--csv="):
        run_folders(tmp_path / "x.csv")


def test_a_run_is_what_its_files_say(sweep_folder: Path) -> None:
    folders = run_folders(sweep_folder)
    found = read(*folders)
    assert (found.skipped, len(found.runs)) == ([], 4)
    for folder, run in zip(folders, found.runs, strict=True):
        summary, plan = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "plan"))
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert run.seed == config["seed"]
        assert f"{run.setup} · s{run.seed}" == summary["setup"]
        assert (run.workers, run.accumulation, run.k) == (plan["world_size"], plan["accumulation_steps"], plan["k"])
        assert run.metric == summary["eval"]["loss"]
        assert run.row_metrics is not None
        assert len(run.row_metrics) == summary["data"]["eval_samples"]
        assert (run.block.metric, run.block.goal) == ("loss", "min")
        assert run.block.total_samples == plan["total_samples"]
        if summary["samples_per_s"]:
            assert run.seconds == pytest.approx(summary["samples_seen"] / summary["samples_per_s"])
        assert run.certificate is not None
        assert run.certificate["global_batch"].value == plan["global_batch"]
        assert run.curve[-1][0] == summary["samples_seen"]
        assert run.curve[-1][1] > 0
        assert run.values["optimizer.lr"] == str(config["optimizer"]["lr"])
        assert run.mlflow_run_id == summary["mlflow_run_id"]


def test_seeds_make_one_setup(sweep_folder: Path) -> None:
    """Two setups with two seeds; two workers with the same micro-batch have twice the global batch: comparable."""
    (block,) = compare_runs(read(*run_folders(sweep_folder))).blocks
    assert [(row.setup.name, row.setup.seeds) for row in block.rows] == [("cpu", (0, 1)), ("cpu2", (0, 1))]
    relation = block.rows[1].comparability
    assert relation is not None
    assert relation.level == "comparable"
    assert "global_batch × 2" in relation.differs


def test_a_run_of_a_busy_machine_is_one_by_its_diagnoses(jobs: list[Path]) -> None:
    for number, job in enumerate(jobs):
        kinds = ["communication", "busy"] if number == 1 else ["nothing"]
        change(job, "summary.json", diagnoses=[{"kind": kind, "sentence": "", "lost_share": 0.2} for kind in kinds])
    assert [run.busy for run in read(*jobs).runs] == [False, True, False, False]


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "failed": (lambda f: (f / "summary.json").write_text('{"status": "FAILED", "error": "x"}'), "FAILED (x)"),
    "still running": (lambda f: (f / "summary.json").unlink(), "no summary.json"),
    "of another tool": (lambda f: (f / "summary.json").write_text('{"score": 1}'), "no status"),
    "half written": (lambda f: (f / "summary.json").write_text('{"status": "FIN'), "cannot be read"),
    "no plan": (lambda f: (f / "plan.json").unlink(), "plan.json"),
    "a list": (lambda f: (f / "plan.json").write_text("[]"), "not what the runner writes"),
    "no yaml": (lambda f: (f / "config.yaml").write_text("a: [1"), "cannot be read"),
    "no metric": (lambda f: change(f, "summary.json", eval={"f1": 1}), "has no metric loss"),
    "of an early version": (lambda f: change(f, "summary.json", setup_digest=None), "early version"),
    "no workers": (lambda f: change(f, "plan.json", world_size=None), "world_size"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_folder_without_a_finished_run_is_skipped_with_a_reason(jobs: list[Path], case: str) -> None:
    damage, reason = DAMAGE[case]
    damage(jobs[3])
    found = read(*jobs)
    assert len(found.runs) == 3
    assert [one.source for one in found.skipped] == ["3"]
    assert reason in found.skipped[0].reason


DIVERGED: dict[str, Callable[[Path], object]] = {
    "ended by the runner": lambda f: change(f, "summary.json", status="FAILED", diverged=True, error="loss", eval={}),
    "its metric": lambda f: change(f, "summary.json", eval={"loss": "Infinity"}),
}


@pytest.mark.parametrize("case", DIVERGED)
def test_a_run_that_diverged_leaves_its_setup_without_verdict(jobs: list[Path], case: str) -> None:
    """It is flagged with the reason."""
    DIVERGED[case](jobs[3])
    found = read(*jobs)
    (block,) = compare_runs(found).blocks
    (flag,) = [flag for flag in block.flags if flag.kind == "diverged"]
    assert (flag.setups, flag.runs) == (("cpu2",), ("3",))
    assert "loss" in flag.text
    assert block.rows[1].verdict is not None
    assert block.rows[1].verdict.kind == "no verdict"


def test_optional_parts_may_be_missing(jobs: list[Path]) -> None:
    """No certificate, no metrics, half a last line, too short to time, resumed, a diverged metric: still runs."""
    (jobs[0] / "certificate.json").unlink()
    (jobs[1] / "metrics.jsonl").unlink()
    with (jobs[2] / "metrics.jsonl").open("a") as file:
        file.write('{"key": "train/lo')
    change(jobs[2], "summary.json", eval={"loss": math.nan})  # bare NaN
    change(jobs[2], "certificate.json", withdrawn="the ledger is not sound")
    change(jobs[3], "summary.json", samples_per_s=None)
    change(jobs[0], "summary.json", resumed_after=[2])
    a, b, c, d = read(*jobs).runs
    assert (a.certificate, b.curve, c.withdrawn, d.seconds) == (None, (), "the ledger is not sound", None)
    assert [run.phases is None for run in (a, b, c, d)] == [True, False, False, True]
    assert len(c.curve) > 1
    assert math.isnan(c.metric)


def test_another_metric(jobs: list[Path]) -> None:
    """By name, with its direction; runs without it are skipped; a name that no run has is an error."""
    for folder in jobs[:3]:
        change(folder, "summary.json", eval={"loss": 1.0, "f1": 70.0})
    found = read(*jobs, metric="f1")
    assert [(run.metric, run.block.metric, run.block.goal) for run in found.runs] == [(70.0, "f1", "max")] * 3
    assert found.skipped[0].reason == "has no metric f1"
    change(jobs[3], "summary.json", eval={"perplexity": 3.0})
    assert [run.block.goal for run in read(*jobs, metric="perplexity").runs] == ["min"]
    with pytest.raises(UserError, match=r"--metric=f2.*did you mean 'f1'"):
        read(*jobs, metric="f2")


def test_a_run_that_saw_fewer_samples_is_in_another_block(jobs: list[Path]) -> None:
    """Because of `max_steps`, or without its tail."""
    total = json.loads((jobs[3] / "plan.json").read_text())["total_samples"]
    change(jobs[3], "plan.json", total_samples=total - 7)
    blocks = compare_runs(read(*jobs)).blocks
    assert sorted((len(block.rows), block.key.total_samples) for block in blocks) == [(1, total - 7), (2, total)]


def test_the_newer_run_is_the_one_that_started_later(jobs: list[Path]) -> None:
    """Whatever the age of its files, which copying and a late upload change."""
    again = jobs[0].with_name("again")
    shutil.copytree(jobs[0], again)
    change(again, "tracking.json", started=json.loads((jobs[0] / "tracking.json").read_text())["started"] - 60_000)
    first, second = (read(folder).runs[0].order for folder in (jobs[0], again))
    assert second < first


def test_a_certificate_with_an_unknown_level(jobs: list[Path]) -> None:
    """From a newer version: it ends nothing."""
    path = jobs[3] / "certificate.json"
    content = json.loads(path.read_text())
    for row in [*content["equal"], *content["different"]]:
        row["allows"] = "nearly anything"
    path.write_text(json.dumps(content))
    (block,) = compare_runs(read(*jobs)).blocks
    assert block.rows[1].comparability is not None
