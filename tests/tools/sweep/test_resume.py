"""Finding a sweep, one command at a time, and recording the end of jobs that were killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.config.arguments import take_resume
from runner.errors import UserError
from runner.tools.sweep.resume import find_sweep, mark_killed_jobs, sweep_lock
from runner.tools.sweep.sweep import attempts
from runner.track.card import TrackingRecord
from tests.folder.test_lock import lock_holder
from tests.tools.sweep.folders import job_in, sweep_in


@pytest.mark.parametrize(
    ("typed", "rest", "value"),
    [
        (["seed=0", "resume_sweep=x", "device=cpu"], ["seed=0", "device=cpu"], "x"),
        (["++resume_sweep='a b'"], [], "a b"),
        (["resume_sweep=outputs/sweeps/a=b"], [], "outputs/sweeps/a=b"),
        (["recipe.resume_sweep=x", "resume_sweeps=x"], ["recipe.resume_sweep=x", "resume_sweeps=x"], None),
    ],
)
def test_take_resume(typed: list[str], rest: list[str], value: str | None) -> None:
    """It is removed from the overrides, and the others keep their order."""
    assert take_resume(typed) == (rest, value)


def card(folder: Path, run_id: str | None) -> TrackingRecord:
    card = TrackingRecord("e", "r", {}, {}, "sqlite:///x.db", run_id=run_id)
    card.write(folder)
    return card


def test_find_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its id, its MLflow run or its folder; not by a job's run or a part of an id. Invalid cards are skipped."""
    sweeps = tmp_path / "sweeps"
    for name, run_id in (("monday", "aaa1"), ("tuesday", "bbb2"), ("invalid", None)):
        sweep_in(sweeps / name).write()
        card(sweeps / name, run_id)
        card(job_in(sweeps / name, "0", "seed=0"), f"{run_id}-job")
    (sweeps / "invalid" / "tracking.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    for identifier in ("tuesday", "bbb2", "sweeps/tuesday"):
        assert find_sweep(identifier, sweeps).resolve() == sweeps / "tuesday"
    assert find_sweep("invalid", sweeps) == sweeps / "invalid"
    for wrong in ("bbb2-job", "tues", "sweeps", "sweeps/monday/0", "None", "*"):
        with pytest.raises(UserError, match="is not a sweep in"):
            find_sweep(wrong, sweeps)
    with pytest.raises(UserError, match=r"resume_sweep=mondya .*did you mean 'monday'"):
        find_sweep("mondya", sweeps)
    with pytest.raises(UserError, match="no sweeps"):
        find_sweep("monday", Path("elsewhere"))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """While a command or one of its jobs runs, a sweep cannot be resumed, and the job is not marked as killed."""
    running, dead = job_in(tmp_path, "0", "seed=0"), job_in(tmp_path, "1", "seed=1")
    with lock_holder(tmp_path), pytest.raises(UserError, match="still running"), sweep_lock(tmp_path):
        pass
    with lock_holder(running):
        mark_killed_jobs(tmp_path)
        assert not (running / "summary.json").exists()
        assert json.loads((dead / "summary.json").read_text())["status"] == "KILLED"
        with pytest.raises(UserError, match=r"still running \(seed=0\)"), sweep_lock(tmp_path):
            pass
    with sweep_lock(tmp_path):
        mark_killed_jobs(tmp_path)
    assert json.loads((running / "summary.json").read_text())["status"] == "KILLED"


def test_mark_killed_jobs(tmp_path: Path) -> None:
    """A job without a summary is KILLED, in summary and card; a card without a status gets that of the summary."""
    done = job_in(tmp_path, "0", "seed=0", 1.0, status="FINISHED", eval={"loss": 1.0})
    card(done, "one").mark_ended(done, "FINISHED")
    killed = job_in(tmp_path, "1", "seed=1", 2.0)
    started = card(killed, "two").started
    untracked = job_in(tmp_path, "2", "seed=2", 3.0)
    between = job_in(tmp_path, "3", "seed=3", 4.0, status="FAILED")
    card(between, "three")
    before = {path: path.read_bytes() for path in done.iterdir()}
    mark_killed_jobs(tmp_path)
    assert [state.status for state in attempts(tmp_path)] == ["FINISHED", "KILLED", "KILLED", "FAILED"]
    assert {path: path.read_bytes() for path in done.iterdir()} == before
    assert TrackingRecord.read(between).status == "FAILED"
    closed = TrackingRecord.read(killed)
    assert (closed.status, closed.run_id, closed.delivered) == ("KILLED", "two", False)
    assert closed.ended is not None
    assert closed.ended >= started
    assert not (untracked / "tracking.json").exists()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    mark_killed_jobs(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == after


def test_files_that_a_crashed_machine_left_empty(tmp_path: Path) -> None:
    """Without a summary or card a job was killed; without a `job.json` it never started."""
    no_summary = job_in(tmp_path, "1", "seed=1", 2.0, status="FINISHED")
    no_job = job_in(tmp_path, "2", "seed=2", 3.0)
    no_card = job_in(tmp_path, "3", "seed=3", 4.0)
    for empty in (no_summary / "summary.json", no_job / "job.json", no_card / "tracking.json"):
        empty.write_text("")
    mark_killed_jobs(tmp_path)
    assert {state.folder: state.status for state in attempts(tmp_path)} == {no_summary: "KILLED", no_card: "KILLED"}
