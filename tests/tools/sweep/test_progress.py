"""The line about all jobs, and the messages about jobs in other processes."""

from __future__ import annotations

import dataclasses
import functools
import io
from pathlib import Path

import pytest
from rich.console import Console

from runner.folder.files import write_json
from runner.run.progress import Background
from runner.tools.sweep import progress
from runner.tools.sweep.progress import duration, monitor_jobs, progress_line, seconds_left, sweep_progress
from runner.tools.sweep.sweep import JobState, Sweep
from tests.tools.sweep.folders import job_in, sweep_in, train_to
from tests.tools.sweep.gated import wait_until


def state(status: str, wall_s: float | None = None) -> JobState:
    return JobState(Path("nowhere"), ("job",), "job", 0.0, status, wall_s=wall_s)


class HalfDone(JobState):
    @property
    def share_done(self) -> float:
        return 0.5


DONE, FAILED, RUNNING, KILLED = state("FINISHED", 60.0), state("FAILED", 1.0), state("RUNNING"), state("KILLED", 500.0)
STOPPED = dataclasses.replace(state("STOPPED"), error="place 2 of 2")
HALF = HalfDone(Path("nowhere"), ("half",), "half", 0.0, "RUNNING")


@pytest.mark.parametrize(
    ("states", "total", "parallel", "line"),
    [
        ([RUNNING], 18, 1, "0 of 18 jobs done"),
        ([RUNNING, RUNNING], 18, 2, "0 of 18 jobs done, 2 running"),
        ([DONE, FAILED, RUNNING], 4, 2, "2 of 4 jobs done, 1 failed, 1 running; about 60 s left"),
        ([DONE, HALF], 2, 1, "1 of 2 jobs done; about 30 s left"),
        ([FAILED], 2, 1, "1 of 2 jobs done, 1 failed"),
        ([DONE, STOPPED], 2, 1, "1 of 2 jobs done, 1 stopped"),
        ([DONE], None, 1, "1 jobs done"),
    ],
)
def test_progress_line(states: list[JobState], total: int | None, parallel: int, line: str) -> None:
    assert progress_line(states, total, parallel) == line


@pytest.mark.parametrize(
    ("states", "total", "parallel", "seconds"),
    [
        ([FAILED], 5, 1, None),  # no finished job to estimate from
        ([DONE], None, 1, None),
        ([DONE], 5, 2, 120.0),
        ([state("FINISHED", 30.0), state("FINISHED", 90.0)], 5, 1, 180.0),
        ([DONE, FAILED], 5, 1, 180.0),  # a failed job is done, but says nothing about the time
        ([DONE, KILLED], 5, 1, 240.0),  # a killed job has to run again
        ([DONE, HALF, HALF], 5, 2, 90.0),
        ([DONE, DONE, DONE], 2, 1, 0.0),
    ],
)
def test_seconds_left(states: list[JobState], total: int | None, parallel: int, seconds: float | None) -> None:
    assert seconds_left(states, total, parallel) == seconds


def test_duration() -> None:
    assert [duration(s) for s in (0.0, 1.6, 89.4, 90.0, 5399.0, 5400.0)] == [
        *("1 s", "2 s", "89 s"),
        *("2 min", "90 min", "1.5 h"),
    ]


def test_progress_is_read_from_the_folder(tmp_path: Path) -> None:
    """Jobs of this command only, each once, whatever the number of attempts."""
    sweep = sweep_in(tmp_path, at_once=2)
    job_in(tmp_path, "0", "seed=0", 1.0, status="KILLED", error="killed")
    job_in(tmp_path, "0-2", "seed=0", 2.0, status="FINISHED", wall_s=40.0)
    job_in(tmp_path, "9", "seed=9", 3.0, status="FAILED")
    train_to(job_in(tmp_path, "1", "seed=1", 4.0), 1, of=4)
    assert sweep_progress(sweep) == "1 of 3 jobs done, 1 running; about 35 s left"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Started after job 0 had finished, and before job 1."""
    monkeypatch.setattr(progress, "_POLL_S", 0.02)
    job_in(tmp_path, "0", "seed=0", 10.0, status="FINISHED", wall_s=3.0)
    job_in(tmp_path, "1", "seed=1", 60.0)
    return dataclasses.replace(sweep_in(tmp_path), started_at=50.0, at_once=2)


def test_jobs_are_reported_as_they_end(tmp_path: Path, sweep: Sweep) -> None:
    """Also a job that ends before the first look; not those of an earlier command, nor running ones."""
    output = io.StringIO()
    with Background("jobs", functools.partial(monitor_jobs, sweep, Console(file=output, width=120))):
        write_json(tmp_path / "1" / "summary.json", {"status": "FINISHED", "wall_s": 5.0})
        wait_until(lambda: "seed=1" in output.getvalue(), "the end of the first job is not reported", 30)
        job_in(tmp_path, "2", "seed=2", 61.0, status="FAILED", error="[oops] out of memory")
    assert [line.split("  —  ") for line in output.getvalue().strip().splitlines()] == [
        ["finished  seed=1", "2 of 3 jobs done; about 2 s left"],
        ["failed  seed=2 ([oops] out of memory)", "3 of 3 jobs done, 1 failed"],
    ]
