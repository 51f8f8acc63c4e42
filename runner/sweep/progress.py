"""One line about all jobs of a sweep, with the time left."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status

from runner.sweep.states import FAILED, FINISHED, RUNNING, JobState, attempts, latest
from runner.sweep.sweep import Sweep

#: Seconds between two looks at the jobs' folders.
_LOOK_EVERY = 0.5


def progress_line(states: Sequence[JobState], total: int | None, at_once: int) -> str:
    """`3 of 18 jobs done, 1 failed, 2 running; about 12 min left`.

    The time left takes every job that is missing to be as long as those that finished, on average.
    """
    count = {status: sum(state.status == status for state in states) for status in (FINISHED, FAILED, RUNNING)}
    done = count[FINISHED] + count[FAILED]
    parts = [f"{done} of {total} jobs done" if total is not None else f"{done} jobs done"]
    told = (FAILED, RUNNING) if at_once > 1 else (FAILED,)
    parts += [f"{count[status]} {status.lower()}" for status in told if count[status]]
    left = seconds_left(states, total, at_once)
    return ", ".join(parts) + (f"; about {in_words(left)} left" if left else "")


def seconds_left(states: Sequence[JobState], total: int | None, at_once: int) -> float | None:
    """Seconds until the last job ends, None while that cannot be known."""
    lengths = [state.wall_s for state in states if state.status == FINISHED and state.wall_s]
    if total is None or not lengths:
        return None
    ended = sum(state.status in (FINISHED, FAILED) for state in states)
    under_way = sum(state.share for state in states if state.status == RUNNING)
    return max(0.0, total - ended - under_way) * statistics.mean(lengths) / at_once


def in_words(seconds: float) -> str:
    """A length of time as one says it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def line_of(sweep: Sweep) -> str:
    """The progress line of a sweep, from its folder."""
    states = latest(attempts(Path(sweep.folder)), sweep.jobs)
    return progress_line(states, sweep.total, sweep.at_once)


class Overview:
    """Shows the line while jobs run in other processes."""

    def __init__(self, sweep: Sweep, console: Console) -> None:
        self._sweep = sweep
        self._console = console

    def follow(self, done: threading.Event) -> None:
        """Look at the jobs' folders until `done`."""
        told: dict[Path, str] = {}
        with Status("starting", console=self._console) as status:
            while not done.wait(_LOOK_EVERY):
                self._tell(told)
                if self._console.is_terminal:
                    status.update(line_of(self._sweep))
        self._tell(told)

    def _tell(self, told: dict[Path, str]) -> None:
        """A line for each job that has ended since the last look."""
        for state in attempts(Path(self._sweep.folder)):
            before = told.setdefault(
                state.folder, RUNNING if state.started_at >= self._sweep.started_at else state.status
            )
            if state.status == before:
                continue
            told[state.folder] = state.status
            why = f" ({state.error})" if state.error else ""
            self._console.print(
                f"{state.status.lower()}  {state.shown}{why}  —  {line_of(self._sweep)}", soft_wrap=True, markup=False
            )
