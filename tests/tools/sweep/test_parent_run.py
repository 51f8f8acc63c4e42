"""The parent run of a sweep in a real SQLite store."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from runner.config.schema import Evaluation, Tracking
from runner.errors import UserError
from runner.tools.sweep.parent_run import ParentRun, parent_card
from runner.track.card import TrackingRecord
from tests.tools.sweep.folders import job_in, sweep_in
from tests.tools.sweep.stores import empty_store

EVALUATION = Evaluation(metric="accuracy")


def test_opened_closed_and_resumed(tmp_path: Path) -> None:
    """It stays one run, RUNNING while jobs run; its counts are those of the last command."""
    tracking = Tracking(mlflow=True, uri=empty_store(tmp_path / "x.db"))
    uri, folder, client = str(tracking.uri), tmp_path / "s", MlflowClient(tracking.uri)
    sweep = sweep_in(folder)
    card = parent_card(tracking, folder, "cola", ("seed", "device"), "accuracy")
    assert card.run_name == "sweep · cola · seed × device"
    assert parent_card(tracking, folder, "cola", ("seed", "device"), "accuracy") == card
    with pytest.raises(UserError, match="tracking=none"):
        parent_card(Tracking(), folder, "cola", ("seed",), "accuracy")
    parent = ParentRun(card, sweep, uri, EVALUATION)
    run_id = parent.open()
    for number, status in enumerate(("FINISHED", "FAILED", "FAILED")):
        job_in(folder, str(number), f"seed={number}", status=status)
    parent.close("FINISHED")
    run = client.get_run(run_id)
    assert run.info.status == "FAILED"  # not all jobs finished
    assert {name: run.data.tags[f"sweep.{name}"] for name in ("jobs", "finished", "failed", "killed")} == {
        "jobs": "3",
        "finished": "1",
        "failed": "2",
        "killed": "0",
    }
    TrackingRecord.read(folder).update(folder, run_id=None)  # the store created the run, but the response was lost
    again = ParentRun(TrackingRecord.read(folder), sweep, uri, EVALUATION)
    assert again.open() == run_id
    assert client.get_run(run_id).info.status == "RUNNING"
    assert TrackingRecord.read(folder).status is None
    for number in (1, 2):
        job_in(folder, f"{number}-2", f"seed={number}", 200.0, status="FINISHED")
    again.close("FINISHED")
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["sweep.failed"]) == ("FINISHED", "0")


def test_a_store_that_fails(tmp_path: Path) -> None:
    """Before any job has started."""
    (tmp_path / "x.db").write_text("not a database" * 100)
    tracking = Tracking(mlflow=True, uri=f"sqlite:///{tmp_path / 'x.db'}")
    parent = ParentRun(
        parent_card(tracking, tmp_path, "cola", ("seed",), "accuracy"),
        sweep_in(tmp_path),
        str(tracking.uri),
        EVALUATION,
    )
    with pytest.raises(UserError, match=r"^tracking\.uri=sqlite:.*tracking=none$"):
        parent.open()


def test_killed_jobs_are_closed_in_the_sweeps_store(tmp_path: Path) -> None:
    """Untracked jobs and those of another store are left alone."""
    tracking = Tracking(mlflow=True, uri=empty_store(tmp_path / "x.db"))
    sweep = sweep_in(tmp_path / "s")
    for number, store in enumerate((tracking.uri, None, "sqlite:///another.db")):
        job = job_in(tmp_path / "s", str(number), f"seed={number}", status="KILLED")
        TrackingRecord("mine", f"job {number}", {}, {}, store).mark_ended(job, "KILLED")
    parent = ParentRun(
        parent_card(tracking, tmp_path / "s", "cola", ("seed",), "accuracy"), sweep, str(tracking.uri), EVALUATION
    )
    parent.open()
    parent.close("KILLED")
    client = MlflowClient(tracking.uri)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert sorted(run.info.run_name for run in found) == ["job 0", "sweep · cola · seed"]
    assert {run.info.status for run in found} == {"KILLED"}
