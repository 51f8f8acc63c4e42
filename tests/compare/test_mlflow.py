"""Runs found in a real SQLite store, and the report put back beside them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from runner import cli
from runner.compare.command import _parser
from runner.compare.runs import Found
from runner.compare.sources import find_runs, with_parent


@pytest.fixture
def here(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the sweep was started, with its store in the usual place."""
    monkeypatch.chdir(sweep)
    return sweep


def find(*arguments: str) -> Found:
    return find_runs(_parser().parse_intermixed_args(list(arguments)))


def client(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / 'outputs' / 'mlflow.db'}")


def logged(root: Path) -> list[Any]:
    store = client(root)
    return list(store.search_runs([one.experiment_id for one in store.search_experiments()]))


def parent_id(root: Path) -> str:
    (parent,) = {run.data.tags["mlflow.parentRunId"] for run in logged(root) if "mlflow.parentRunId" in run.data.tags}
    return str(parent)


def facts(found: Found) -> list[tuple[Any, ...]]:
    return sorted((run.setup, run.seed, run.metric, run.seconds, len(run.curve), run.digest) for run in found.runs)


def test_every_way_to_the_runs_finds_the_same(here: Path, sweep_folder: Path) -> None:
    """Folder, sweep id, parent's id, each run's id, experiment: the same four runs with the same numbers."""
    parent = parent_id(here)
    ids = [run.info.run_id for run in logged(here) if run.info.run_id != parent]
    expected = facts(find(str(sweep_folder)))
    assert len(expected) == 4
    for arguments in (["--sweep", sweep_folder.name], [parent], ids, ["--experiment", "runner"]):
        assert facts(find(*arguments)) == expected


def test_a_sweep_is_found_by_its_tag_where_there_is_no_folder(
    sweep: Path, sweep_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder only the store knows the sweep's id; its parent is not compared, and named."""
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{sweep / 'outputs' / 'mlflow.db'}"
    found = find("--sweep", sweep_folder.name, "--tracking-uri", uri)
    assert facts(found) == facts(find(str(sweep_folder)))
    assert [one.reason for one in found.refused] == ["the parent of a sweep"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert facts(find("--sweep", sweep_folder.name)) == facts(found)


def test_a_folder_beside_its_own_id_is_one_run(here: Path, sweep_folder: Path) -> None:
    """The same run given twice, in two ways, counts once."""
    (first, *_) = find(str(sweep_folder / "0")).runs
    assert first.mlflow_run_id is not None
    assert len(find(str(sweep_folder / "0"), first.mlflow_run_id, str(sweep_folder / "1")).runs) == 2


@pytest.fixture
def copied(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the store, which a test may write to; the artifacts lie where they lay."""
    (tmp_path / "outputs").mkdir()
    shutil.copy(sweep / "outputs" / "mlflow.db", tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_of_two_sweeps_have_no_common_parent(copied: Path) -> None:
    """One run moved to another parent: the report belongs to neither sweep."""
    found = find("--experiment", "runner")
    assert with_parent(found, None)[0].parent == parent_id(copied)
    assert found.runs[0].mlflow_run_id is not None
    client(copied).set_tag(found.runs[0].mlflow_run_id, "mlflow.parentRunId", "f" * 32)
    assert with_parent(found, None)[0].parent is None


def test_what_is_not_compared_is_named(copied: Path) -> None:
    """A failed run, a running one and one of another tool in the same experiment: counted, with their reasons."""
    store = client(copied)
    experiment = store.get_experiment_by_name("runner")
    assert experiment is not None
    for name, status in (("broken", "FAILED"), ("slow", None), ("other tool", "FINISHED")):
        run = store.create_run(experiment.experiment_id, run_name=name)
        if status:
            store.set_terminated(run.info.run_id, status)
    found = find("--experiment", "runner")
    assert len(found.runs) == 4
    reasons = {one.source.partition(" (")[0]: one.reason for one in found.refused}
    assert reasons["broken"] == "FAILED"
    assert reasons["slow"] == "RUNNING"
    assert sorted(reasons.values())[-2:] == [
        "no summary.json: still running, or ended without closing its books",
        "the parent of a sweep",
    ]


def test_the_report_is_logged_to_the_sweeps_parent(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files under `compare`; not with --no-log; not when a run of no sweep is among them."""
    parent, store = parent_id(here), client(here)

    def report() -> str:
        return Path(store.download_artifacts(parent, "compare/report.html", str(tmp_path))).read_text()

    assert cli.compare_main([parent, "--margin", "7", "--no-log"]) == 0
    assert "logged to" not in capsys.readouterr().out
    assert cli.compare_main([parent, "--margin", "8"]) == 0
    assert f"logged to MLflow run {parent}, under compare/" in capsys.readouterr().out
    assert f"python -m runner.compare {parent} --margin 8" in report()
    assert cli.compare_main([parent, "--margin", "9", "--no-log"]) == 0
    assert "--margin 8" in report()
    names = {artifact.path.partition("/")[2] for artifact in store.list_artifacts(parent, "compare")}
    assert names >= {"report.html", "runs.csv", "setups.csv", "loss_vs_samples.png"}
    found = find(parent)
    assert with_parent(found, None)[0].parent == parent
    stranger = Found([*found.runs[1:], dataclasses.replace(found.runs[0], mlflow_run_id=None)])
    assert with_parent(stranger, None)[0].parent is None


def test_folders_without_a_store_are_compared_all_the_same(
    sweep_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No store here: nothing is logged, and none is made."""
    monkeypatch.chdir(tmp_path)
    assert cli.compare_main([str(sweep_folder), "--out", "result"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
