"""`runs.csv`: one line per run, from which an interrupted benchmark continues."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: `metric`: of the task, in percent; `comm_bytes`: sent by one worker; `digest`: of all settings but the seed.
COLUMNS = (
    *("task", "setup", "lr", "seed", "status", "metric", "eval_loss", "train_loss", "optimizer_steps", "samples_seen"),
    *("samples_per_s", "wall_s", "synchronisations", "comm_bytes", "comm_stall_s", "drift_mean", "fragments", "delay"),
    *("certificate", "machine", "data", "digest", "commit", "finished_at"),
)
FINISHED, FAILED = "FINISHED", "FAILED"
Row = Mapping[str, str]


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
