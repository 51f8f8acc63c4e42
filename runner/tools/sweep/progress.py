"""One line about all jobs of a sweep, with the estimated time left."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status

from runner.folder.record import FAILED, FINISHED, STOPPED
from runner.tools.sweep.sweep import RUNNING, JobState, Sweep, attempts

#: Seconds between two looks at the jobs' folders.
_POLL_S = 0.5


def sweep_progress(sweep: Sweep) -> str:
    """The progress line of a sweep, from its folder."""
    return progress_line(sweep.states(), sweep.total, sweep.at_once)


def progress_line(states: Sequence[JobState], total: int | None, at_once: int) -> str:
    """`3 of 18 jobs done, 1 failed, 2 running; about 12 min left`. `total`: None if unknown."""
    count = {status: sum(state.status == status for state in states) for status in (FINISHED, FAILED, STOPPED, RUNNING)}
    done = count[FINISHED] + count[FAILED]
    parts = [f"{done} of {total} jobs done" if total is not None else f"{done} jobs done"]
    shown = (FAILED, STOPPED, RUNNING) if at_once > 1 else (FAILED, STOPPED)
    parts += [f"{count[status]} {status.lower()}" for status in shown if count[status]]
    left = seconds_left(states, total, at_once)
    return ", ".join(parts) + (f"; about {duration(left)} left" if left else "")


def seconds_left(states: Sequence[JobState], total: int | None, at_once: int) -> float | None:
    """Estimated seconds until the last job ends, from the mean time of finished jobs; None if there are none."""
    wall_s = [state.wall_s for state in states if state.status == FINISHED and state.wall_s]
    if total is None or not wall_s:
        return None
    done = sum(_share_done(state) for state in states if state.status in (FINISHED, FAILED, STOPPED, RUNNING))
    return max(0.0, total - done) * statistics.mean(wall_s) / at_once


def _share_done(state: JobState) -> float:
    return 1.0 if state.error else state.share_done  # one that a race has stopped for good says why


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, with the precision of an estimate."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def monitor_jobs(sweep: Sweep, console: Console, done: threading.Event) -> None:
    """Show the progress of jobs that run in other processes until `done` is set: poll their folders."""
    last: dict[Path, str] = {}

    def print_ended() -> None:
        """A line for each job that has ended since the last call."""
        for state in attempts(Path(sweep.folder)):
            earlier_command = state.started_at < sweep.started_at
            before = last.setdefault(state.folder, state.status if earlier_command else RUNNING)
            if state.status != before:
                last[state.folder] = state.status
                why = f" ({state.error})" if state.error else ""
                text = f"{state.status.lower()}  {state.shown}{why}  —  {sweep_progress(sweep)}"
                console.print(text, soft_wrap=True, markup=False)

    with Status("starting", console=console) as status:
        while not done.wait(_POLL_S):
            print_ended()
            if console.is_terminal:
                status.update(sweep_progress(sweep))
    print_ended()
