"""`runs.csv`: one line per run, from which an interrupted benchmark continues."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

#: `metric`: of the task, in percent; `comm_bytes`: sent by one worker; `digest`: of all settings but the seed.
COLUMNS = (
    *("task", "setup", "lr", "seed", "status", "metric", "eval_loss", "train_loss", "optimizer_steps", "samples_seen"),
    *("samples_per_s", "wall_s", "synchronisations", "comm_bytes", "comm_stall_s", "drift_mean", "fragments", "delay"),
    *("certificate", "machine", "data", "digest", "commit", "finished_at"),
)
FINISHED, FAILED = "FINISHED", "FAILED"
#: A run that has failed this many times is not retried.
MOST_FAILURES = 2
Row = Mapping[str, str]


class PlannedJob(Protocol):
    """A run that a row describes once it has ended."""

    @property
    def seed(self) -> int: ...

    def digest(self, data: str) -> str: ...


AnyJob = TypeVar("AnyJob", bound=PlannedJob)


def missing_jobs(jobs: Iterable[AnyJob], rows: Sequence[Row], data: str) -> list[AnyJob]:
    """Return the jobs that have not finished, and have not failed too often. `data`: digest of its files."""
    done: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["data"] == data:
            done.setdefault((row["digest"], row["seed"]), []).append(row["status"])

    def is_missing(job: AnyJob) -> bool:
        tried = done.get((job.digest(data), str(job.seed)), [])
        return FINISHED not in tried and len(tried) < MOST_FAILURES

    return [job for job in jobs if is_missing(job)]


def settings_digest(overrides: Sequence[str], data: str) -> str:
    """Return a digest of data and settings without the seed, which is the last override."""
    return hashlib.sha256(json.dumps([data, *overrides[:-1], "seed=0"]).encode()).hexdigest()[:12]


def read_rows(path: Path) -> list[Row]:
    """In the order in which runs ended."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, row: Mapping[str, Any], columns: Sequence[str] = COLUMNS) -> None:
    """Add one run, and flush it to disk. Numbers keep every digit; None becomes an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())
