"""Run what is missing, one run at a time, within a time limit."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.sync_table.experiment import Experiment
from benchmarks.sync_table.rows import FINISHED, Row, append_row, read_rows
from benchmarks.sync_table.setups import Job, Setup
from benchmarks.sync_table.train import facts, run_job, terminated_as_interrupted

#: Seconds per epoch before any run has finished.
GUESS_S = 40.0
#: A run that has failed this many times is not retried.
MOST_FAILURES = 2


def missing(jobs: Sequence[Job], rows: Sequence[Row], experiment: Experiment) -> list[Job]:
    """The jobs without a finished run of the same settings."""
    tried: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        tried.setdefault((row["digest"], row["seed"]), []).append(row["status"])
    left = []
    for job in jobs:
        before = tried.get((experiment.digest(job.setup), str(job.seed)), [])
        if FINISHED not in before and len(before) < MOST_FAILURES:
            left.append(job)
    return left


def seconds_of(setup: Setup, rows: Sequence[Row], epochs: int) -> float:
    """Estimated seconds of a run: from finished runs of the same setup, else of the most similar one."""
    done = [row for row in rows if row["status"] == FINISHED]
    for names in (("setup",), ("workers", "accumulation", "policy"), ("workers", "accumulation"), ("workers",)):
        wanted = {name: str(setup.name if name == "setup" else getattr(setup, name)) for name in names}
        alike = [row for row in done if all(row[name] == wanted[name] for name in names)]
        if alike:
            newest = alike[-5:]  # most likely on the present machine
            return epochs * median(float(row["wall_s"]) / int(row["epochs"]) for row in newest)
    return epochs * GUESS_S


def show_missing(jobs: Sequence[Job], rows: Sequence[Row], epochs: int) -> None:
    """Print one line per setup with its missing seeds, and the total time."""
    total = 0.0
    for setup in dict.fromkeys(job.setup for job in jobs):
        seeds = [job.seed for job in jobs if job.setup == setup]
        seconds = seconds_of(setup, rows, epochs)
        total += seconds * len(seeds)
        print(f"{setup.name:24} seeds {' '.join(map(str, seeds)):20} about {seconds:.0f} s each")
    print(f"{len(jobs)} runs are missing, about {total / 60:.0f} minutes")


def run_part(
    experiment: Experiment, jobs: Sequence[Job], results: Path, work: Path, minutes: float | None, majority: float
) -> int:
    """Run the missing `jobs` in order; the number that failed. `minutes`: start none after that."""
    start, failures = time.monotonic(), 0
    with _alone(work) as lock, terminated_as_interrupted():
        left = missing(jobs, read_rows(results), experiment)
        show_missing(left, read_rows(results), experiment.epochs)
        for number, job in enumerate(left, 1):
            if minutes is not None and time.monotonic() - start > 60 * minutes:
                print(f"{minutes:g} minutes are over, {len(left) - number + 1} runs are left")
                break
            known = facts(experiment, job, majority)
            found, trouble = run_job(experiment, job, work, lock)
            append_row(results, {**known, **found})
            failures += bool(trouble)
            done = (
                trouble
                or f"accuracy {found['accuracy']:.2f}, Matthews {found['matthews']:.2f}, {found['wall_s']:.0f} s"
            )
            print(f"{number} of {len(left)}: {job.setup.name} seed {job.seed}: {done}", flush=True)
    return failures


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[int]:
    """Wait until no other part trains. A run whose parent was killed keeps the lock until it ends."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another part is still training: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
