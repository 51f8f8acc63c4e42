"""The line about all jobs, and what is said of jobs that run elsewhere."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner.run.progress import Background
from runner.sweep import progress
from runner.sweep.progress import Overview, in_words, line_of, progress_line, seconds_left
from runner.sweep.states import JobState, attempts
from tests.sweep.folders import job_in, sweep_in, trains
from tests.sweep.gated import wait_until


def state(status: str, wall_s: float | None = None) -> JobState:
    return JobState(Path("nowhere"), ("job",), "job", 0.0, status, wall_s)


DONE, FAILED, RUNNING = state("FINISHED", 60.0), state("FAILED", 1.0), state("RUNNING")


class Half(JobState):
    """A running job that has made half of its steps."""

    @property
    def share(self) -> float:
        return 0.5


HALF = Half(Path("nowhere"), "half", "half", 0.0, "RUNNING")


@pytest.mark.parametrize(
    ("states", "total", "together", "line"),
    [
        ([], 18, 1, "0 of 18 jobs done"),
        ([RUNNING], 18, 1, "0 of 18 jobs done"),  # one runs, of course
        ([RUNNING, RUNNING], 18, 2, "0 of 18 jobs done, 2 running"),
        ([DONE], 3, 1, "1 of 3 jobs done; about 2 min left"),
        ([DONE, FAILED], 3, 1, "2 of 3 jobs done, 1 failed; about 60 s left"),
        ([DONE, FAILED, RUNNING], 4, 2, "2 of 4 jobs done, 1 failed, 1 running; about 60 s left"),
        ([DONE, HALF], 2, 1, "1 of 2 jobs done; about 30 s left"),
        ([FAILED], 2, 1, "1 of 2 jobs done, 1 failed"),  # how long a job takes is not known yet
        ([DONE, DONE], 2, 1, "2 of 2 jobs done"),
        ([DONE], None, 1, "1 jobs done"),  # nobody knows how many there will be
    ],
)
def test_progress_line(states: list[JobState], total: int | None, together: int, line: str) -> None:
    """Done, failed, running and the time left: each is there when there is something to say."""
    assert progress_line(states, total, together) == line


@pytest.mark.parametrize(
    ("states", "total", "together", "seconds"),
    [
        ([], 5, 1, None),
        ([FAILED], 5, 1, None),
        ([DONE], None, 1, None),
        ([DONE], 5, 1, 240.0),
        ([DONE], 5, 2, 120.0),
        ([state("FINISHED", 30.0), state("FINISHED", 90.0)], 5, 1, 180.0),
        ([DONE, FAILED], 5, 1, 180.0),  # a failed job is over, and was no measure of the others
        ([DONE, state("KILLED", 500.0)], 5, 1, 240.0),  # a killed job is to be run again
        ([DONE, HALF, HALF], 5, 2, 90.0),
        ([DONE, DONE], 2, 1, 0.0),
        ([DONE, DONE, DONE], 2, 1, 0.0),  # more than were asked for leave no negative time
    ],
)
def test_seconds_left(states: list[JobState], total: int | None, together: int, seconds: float | None) -> None:
    """What is missing, at the finished jobs' mean length, over as many as run at once."""
    assert seconds_left(states, total, together) == seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "1 s"),
        (0.6, "1 s"),
        (1.6, "2 s"),
        (89.4, "89 s"),
        (90.0, "2 min"),
        (720.0, "12 min"),
        (5399.0, "90 min"),
        (5400.0, "1.5 h"),
        (90_000.0, "25.0 h"),
    ],
)
def test_in_words(seconds: float, words: str) -> None:
    """Seconds below a minute and a half, then minutes, then hours: never more digits than an estimate has."""
    assert in_words(seconds) == words


def test_the_line_of_a_sweep_is_read_from_its_folder(tmp_path: Path) -> None:
    """Only jobs of this command count, each once, however many attempts it took."""
    sweep = sweep_in(tmp_path, at_once=2)
    job_in(tmp_path, "0", "seed=0", 1.0, status="KILLED", error="killed")
    job_in(tmp_path, "0-2", "seed=0", 2.0, status="FINISHED", wall_s=40.0)
    job_in(tmp_path, "9", "seed=9", 3.0, status="FAILED")
    trains(job_in(tmp_path, "1", "seed=1", 4.0), 1, of=4)
    assert line_of(sweep) == "1 of 3 jobs done, 1 running; about 35 s left"


def overview(sweep: Any, terminal: bool = False) -> tuple[Overview, io.StringIO]:
    output = io.StringIO()
    return Overview(sweep, Console(file=output, force_terminal=terminal, width=120)), output


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOOK_EVERY", 0.02)


def end(folder: Path, **summary: Any) -> None:
    draft = folder / ".summary.json"
    draft.write_text(json.dumps(summary))
    draft.rename(folder / "summary.json")


def test_jobs_elsewhere_are_told_as_they_end(tmp_path: Path) -> None:
    """A line for each job that ends while one looks; none for those of an earlier command, nor while they run."""
    sweep = sweep_in(tmp_path, started_at=50.0, at_once=2)
    job_in(tmp_path, "0", "seed=0", 10.0, status="FINISHED", wall_s=3.0)  # before
    running = job_in(tmp_path, "1", "seed=1", 60.0)
    shown, output = overview(sweep)
    with Background("overview", shown.follow):
        third = job_in(tmp_path, "2", "seed=2", 61.0)
        end(running, status="FINISHED", wall_s=5.0)
        wait_until(lambda: "seed=1" in output.getvalue(), "the end of the first is not told", 30)
        end(third, status="FAILED", error="[oops] out of memory")
    lines = output.getvalue().strip().splitlines()
    assert [re.sub("[^\\x00-\\x7f]+", "-", line) for line in lines] == [
        "finished  seed=1  -  2 of 3 jobs done, 1 running; about 2 s left",
        "failed  seed=2 ([oops] out of memory)  -  3 of 3 jobs done, 1 failed",
    ]


def test_a_job_that_is_over_before_one_looks_is_told(tmp_path: Path) -> None:
    """A job that was quicker than the look is told when the sweep ends, and in one line however often one looks."""
    sweep = sweep_in(tmp_path, started_at=50.0)
    shown, output = overview(sweep)
    with Background("overview", shown.follow):
        job_in(tmp_path, "0", "seed=0", 60.0, status="FINISHED", wall_s=3.0)
    assert output.getvalue().count("finished  seed=0") == 1


def test_a_terminal_shows_the_line_all_the_time(tmp_path: Path) -> None:
    """On a terminal the line is there while jobs run, before any has ended."""
    sweep = sweep_in(tmp_path, started_at=50.0)
    job_in(tmp_path, "0", "seed=0", 60.0)
    shown, output = overview(sweep, terminal=True)
    with Background("overview", shown.follow):
        wait_until(lambda: "0 of 3 jobs done" in output.getvalue(), "the line is not shown", 30)
    assert attempts(tmp_path)[0].status == "RUNNING"
