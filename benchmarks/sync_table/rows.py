"""`runs.csv`: one line per finished run, the raw result from which an interrupted benchmark resumes."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Rates in percent; `comm_bytes` and `comm_s` are one worker's; `drift_last` and `cosine_mean`: see docs/sync.md, empty
#: for k = 1; `training_s`: of the planned samples, without first step and evaluation; `majority`: accuracy of one
#: answer for all; `digest`: of all settings but the seed, and `data` of the files and the model.
COLUMNS = (
    "setup",
    "policy",
    "workers",
    "accumulation",
    "k",
    "scaling",
    "seed",
    "status",
    "accuracy",
    "matthews",
    "eval_loss",
    "train_loss",
    "base_lr",
    "lr",
    "epochs",
    "optimizer_steps",
    "samples_seen",
    "samples_per_s",
    "training_s",
    "wall_s",
    "synchronisations",
    "comm_bytes",
    "comm_s",
    "comm_stall_s",
    "drift_last",
    "cosine_mean",
    "certificate",
    "majority",
    "data",
    "digest",
    "commit",
    "machine",
    "finished_at",
)
FINISHED, FAILED = "FINISHED", "FAILED"
Row = Mapping[str, str]


def read_rows(path: Path) -> list[Row]:
    """The rows in the order in which runs finished; an incomplete last line is ignored."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(io.StringIO(_whole_lines(file.read()), newline="")))


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add one run, and flush it to disk. Numbers keep every digit; None becomes an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_bytes().decode("utf-8") if path.exists() else ""
    whole = _whole_lines(text)
    with path.open("r+" if path.exists() else "w", encoding="utf-8", newline="") as file:
        file.truncate(len(whole.encode("utf-8")))
        file.seek(0, os.SEEK_END)
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not whole:
            writer.writeheader()
        elif tuple(next(csv.reader([whole.split("\n")[0]]))) != COLUMNS:
            raise SystemExit(f"{path} has other columns: rename it to start a new file")
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]
