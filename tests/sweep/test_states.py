"""How far jobs have got, read from their folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from runner.sweep.states import JobState, also_known_as, attempts, finished_run, latest, note_start, read_summary
from tests.sweep.folders import job_in, trains


def test_attempts_are_told_by_their_folders(tmp_path: Path) -> None:
    """Oldest first, whatever the folders are called; one without a summary is running, one without a note is none."""
    job_in(tmp_path, "0", "seed=2", 30.0, status="FAILED", error="out of memory", user_error=True, wall_s=4.0)
    job_in(tmp_path, "10", "seed=10", 20.0)
    job_in(tmp_path, "2", "seed=0", 10.0, status="FINISHED", wall_s=2.5)
    (tmp_path / "compare").mkdir()
    (tmp_path / "sweep.json").write_text("{}")
    found = attempts(tmp_path)
    assert [(state.names[0], state.status, state.wall_s) for state in found] == [
        ("seed=0", "FINISHED", 2.5),
        ("seed=10", "RUNNING", None),
        ("seed=2", "FAILED", 4.0),
    ]
    assert [(state.error, state.user_error) for state in found] == [
        (None, False),
        (None, False),
        ("out of memory", True),
    ]
    assert [state.folder.name for state in found] == ["2", "10", "0"]


def test_a_sweep_that_has_not_begun(tmp_path: Path) -> None:
    """No jobs, and no folder, are no attempts."""
    assert attempts(tmp_path) == attempts(tmp_path / "missing") == []


def test_a_note_is_whole_or_not_there(tmp_path: Path) -> None:
    """Others look while it is written: it appears under its name in one go, and leaves no draft."""
    note_start(tmp_path, "seed=0 device=cpu", "seed=0", 12.5)
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
    assert json.loads((tmp_path / "job.json").read_text()) == {
        "names": ["seed=0 device=cpu"],
        "shown": "seed=0",
        "started_at": 12.5,
    }


@pytest.mark.parametrize(
    ("statuses", "counts"),
    [
        (["FAILED", "FINISHED"], 1),
        (["FINISHED", "RUNNING"], 0),  # once done, it stays done
        (["FINISHED", "FAILED"], 0),
        (["KILLED", "FAILED", "RUNNING"], 2),
        (["FAILED", "FINISHED", "KILLED"], 1),
    ],
)
def test_which_attempt_counts(statuses: list[str], counts: int) -> None:
    """Of several attempts at a job the one that finished, or else the last."""
    found = [JobState(Path(str(n)), ("seed=0",), "seed=0", float(n), status) for n, status in enumerate(statuses)]
    assert latest(found, None) == [found[counts]]


def test_jobs_that_are_no_longer_asked_for_do_not_count() -> None:
    """A sweep that goes on with other seeds does not answer for the old ones; a sweeper that draws names all."""
    found = [JobState(Path(name), (name,), name, 0.0, "FAILED") for name in ("seed=0", "seed=1")]
    assert latest(found, ("seed=1", "seed=2")) == [found[1]]
    assert latest(found, ()) == []
    assert latest(found, None) == found


def test_share_of_a_job(tmp_path: Path) -> None:
    """A running job's share is its last step over the plan's; before the first it is 0, and 1 when it has ended."""
    folder = job_in(tmp_path, "0", "seed=0")
    (state,) = attempts(tmp_path)
    assert state.share == 0.0  # neither plan nor metrics
    trains(folder, 3, of=12)
    assert state.share == 0.25
    trains(folder, 6, of=12)
    assert state.share == 0.5
    for status in ("FINISHED", "FAILED", "KILLED"):
        assert dataclasses.replace(state, status=status).share == 1.0


def test_a_job_that_was_done_is_found_by_what_it_is(tmp_path: Path) -> None:
    """Setup, data and seed must be the same, and it must have finished."""
    job_in(tmp_path, "0", "a", 1.0, status="FAILED", setup_digest="x", seed=0)
    job_in(tmp_path, "1", "b", 2.0, status="FINISHED", setup_digest="x", seed=1)
    job_in(tmp_path, "2", "c", 3.0, status="FINISHED", setup_digest="y", seed=0)
    job_in(tmp_path, "3", "d", 4.0)
    assert finished_run(tmp_path, "x", 0) is None
    assert finished_run(tmp_path, "x", 1) == tmp_path / "1"
    assert finished_run(tmp_path, "y", 0) == tmp_path / "2"
    assert finished_run(tmp_path, "y", 1) is None
    job_in(tmp_path, "0-2", "a", 5.0, status="FINISHED", setup_digest="x", seed=0)
    assert finished_run(tmp_path, "x", 0) == tmp_path / "0-2"


def test_no_summary_is_an_empty_one(tmp_path: Path) -> None:
    """A run that is still going on has said nothing."""
    assert read_summary(tmp_path) == {}


def test_another_wording_of_a_job_counts_as_well(tmp_path: Path) -> None:
    """One folder may be what several jobs come to: each of them is done, by whichever name it is asked for."""
    folder = job_in(tmp_path, "0", "seed=0", 1.0, status="FINISHED", wall_s=2.0)
    also_known_as(folder, "seed=0 setup=one")
    also_known_as(folder, "seed=0 setup=one")
    (state,) = attempts(tmp_path)
    assert state.names == ("seed=0", "seed=0 setup=one")
    assert latest([state], ("seed=0", "seed=0 setup=one", "seed=1")) == [state, state]
    assert latest([state], ("seed=0 setup=one",)) == [state]
