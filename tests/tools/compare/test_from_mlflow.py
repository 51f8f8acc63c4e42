"""Runs found in a real SQLite store, and the report logged to their parent."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from runner import cli
from runner.tools.compare.command import _parser, find_runs
from runner.tools.compare.from_mlflow import ExistingStore
from runner.tools.compare.runs import FoundRuns


def find(*arguments: str) -> FoundRuns:
    return find_runs(_parser().parse_intermixed_args(list(arguments)))


def uri_of(root: Path) -> str:
    return f"sqlite:///{root / 'outputs' / 'mlflow.db'}"


def logged(root: Path) -> list[Any]:
    store = MlflowClient(uri_of(root))
    return list(store.search_runs([one.experiment_id for one in store.search_experiments()]))


def parent_id(root: Path) -> str:
    (parent,) = {run.data.tags["mlflow.parentRunId"] for run in logged(root) if "mlflow.parentRunId" in run.data.tags}
    return str(parent)


def facts(found: FoundRuns) -> list[tuple[Any, ...]]:
    return sorted((run.setup, run.seed, run.metric, run.seconds, len(run.curve), run.digest) for run in found.runs)


def test_every_way_to_the_runs_finds_the_same(
    sweep: Path, sweep_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folder, sweep id, parent's id, each run's id, experiment; from another folder with the store's address."""
    monkeypatch.chdir(sweep)
    parent = parent_id(sweep)
    ids = [run.info.run_id for run in logged(sweep) if run.info.run_id != parent]
    expected = facts(find(str(sweep_folder)))
    assert len(expected) == 4
    for arguments in (["--sweep", sweep_folder.name], [parent], ids, ["--experiment", "runner"]):
        assert facts(find(*arguments)) == expected
    (first, *_) = find(str(sweep_folder / "0")).runs
    assert first.mlflow_run_id is not None
    assert len(find(str(sweep_folder / "0"), first.mlflow_run_id, str(sweep_folder / "1")).runs) == 2
    monkeypatch.chdir(tmp_path)
    found = find("--sweep", sweep_folder.name, "--tracking-uri", uri_of(sweep))
    assert facts(found) == expected
    assert [one.reason for one in found.skipped] == ["the parent of a sweep"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri_of(sweep))
    assert facts(find("--sweep", sweep_folder.name)) == expected


def test_unknown_names(sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(sweep)
    cases: list[tuple[list[str], str]] = [
        (["0" * 32], "no run " + "0" * 32),
        (["--experiment", "runer"], "did you mean 'runner'?"),
        (["--sweep", "1999"], "--sweep=1999 has no runs"),
        (["--experiment", "runner", "--metric", "accuracy"], "--metric=accuracy"),
    ]
    for arguments, words in cases:
        assert cli.run_tool("compare", arguments) == cli.EXIT_USER_ERROR
        assert words in capsys.readouterr().err


def test_a_folder_without_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweep's folder and the store are missing: no option is blamed that was not given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli.run_tool("compare", ["--sweep", "2026-11-23_99"]) == cli.EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert "no such runs below this folder" in error
    assert "outputs/sweeps/2026-11-23_99" in error
    assert "--tracking-uri=" not in error
    assert cli.run_tool("compare", ["--sweep", "x", "--tracking-uri", "sqlite:///gone.db"]) == cli.EXIT_USER_ERROR
    assert "--tracking-uri=sqlite:///gone.db" in capsys.readouterr().err


@pytest.fixture
def copied(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the store, which a test may change; the artifacts stay where they are."""
    (tmp_path / "outputs").mkdir()
    shutil.copy(sweep / "outputs" / "mlflow.db", tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_of_two_sweeps_have_no_common_parent(copied: Path) -> None:
    ids = [run.mlflow_run_id for run in find("--experiment", "runner").runs if run.mlflow_run_id]
    assert ExistingStore(None).common_parent(ids) == parent_id(copied)
    assert ExistingStore(None).common_parent([*ids, "f" * 32]) is None
    MlflowClient(uri_of(copied)).set_tag(ids[0], "mlflow.parentRunId", "f" * 32)
    assert ExistingStore(None).common_parent(ids) is None


def test_runs_that_cannot_be_compared_are_named(copied: Path) -> None:
    """A failed run, a running one and one of another tool in the same experiment."""
    store = MlflowClient(uri_of(copied))
    experiment = store.get_experiment_by_name("runner")
    assert experiment is not None
    for name, status in (("broken", "FAILED"), ("slow", None), ("other tool", "FINISHED")):
        run = store.create_run(experiment.experiment_id, run_name=name)
        if status:
            store.set_terminated(run.info.run_id, status)
    found = find("--experiment", "runner")
    assert len(found.runs) == 4
    reasons = {one.source.partition(" (")[0]: one.reason for one in found.skipped}
    assert (reasons["broken"], reasons["slow"]) == ("FAILED", "RUNNING")
    assert "the parent of a sweep" in reasons.values()
    assert any("no summary.json" in reason for reason in reasons.values())


def test_the_report_is_logged_to_the_sweeps_parent(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files under `compare`, unless --no-log is given."""
    monkeypatch.chdir(sweep)
    parent, store = parent_id(sweep), MlflowClient(uri_of(sweep))
    assert cli.run_tool("compare", [parent, "--margin", "8"]) == 0
    assert f"logged to MLflow run {parent}" in capsys.readouterr().out
    assert cli.run_tool("compare", [parent, "--margin", "9", "--no-log"]) == 0
    assert "logged to" not in capsys.readouterr().out
    report = Path(store.download_artifacts(parent, "compare/report.html", str(tmp_path))).read_text()
    assert f"python -m runner.compare {parent} --margin 8" in report
    names = {artifact.path.partition("/")[2] for artifact in store.list_artifacts(parent, "compare")}
    assert names >= {"report.html", "runs.csv", "setups.csv", "loss_vs_samples.png"}
    logged = store.get_run(parent).data
    assert "| cpu2" in logged.tags["mlflow.note.content"]
    assert logged.tags["sweep.verdict"].startswith("cpu2: ")
    assert {"sweep/difference", "sweep/speed_up"} >= logged.metrics.keys() >= {"sweep/difference"}


def test_comparing_folders_needs_no_store(sweep_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is logged, and no store is created. Runs of the runner have a loss curve."""
    monkeypatch.chdir(tmp_path)
    assert cli.run_tool("compare", [str(sweep_folder), "--out", "result"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
    assert (tmp_path / "result" / "loss_vs_samples.png").read_bytes().startswith(b"\x89PNG")
