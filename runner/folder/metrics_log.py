"""`metrics.jsonl`: every logged metric, one JSON object per line, appended by rank 0 and independent of the tracker."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from runner.folder.files import write_text

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class Metric:
    """One value. `step`: optimizer step; `timestamp`: milliseconds since the epoch."""

    key: str
    value: float
    step: int
    timestamp: int


def cut_metrics(folder: Path, step: int) -> None:
    """Remove everything that was logged after optimizer step `step`, from which the run continues."""
    path = folder / FILE_NAME
    if path.exists():
        kept = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if _step_of(line) <= step]
        write_text(path, "".join(kept))


def _step_of(line: str) -> float:
    """The step of a line; infinite for a line that a crash has cut off."""
    return int(json.loads(line)["step"]) if line.endswith("\n") else math.inf


class MetricsLog:
    """The writer, on rank 0. It appends to what an earlier part of the run has logged.

    At its latest step a run can come to log a metric again: when it logs, saves and evaluates in one step, or when it
    continues from a checkpoint of a step that it had evaluated already. The first value stays, as it does in MLflow.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / FILE_NAME
        if path.exists():  # remove a line that a crash has cut off
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        found = MetricsReader(folder).read()
        self._latest = max((metric.step for metric in found), default=0)
        self._keys = {metric.key for metric in found if metric.step == self._latest}
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if step > self._latest:
            self._latest, self._keys = step, set()
        if step == self._latest:
            metrics = {key: value for key, value in metrics.items() if key not in self._keys}
            self._keys |= metrics.keys()
        timestamp = time.time_ns() // 1_000_000
        lines = (
            json.dumps({"key": key, "value": value, "step": step, "timestamp": timestamp})
            for key, value in metrics.items()
        )
        self._file.write("".join(line + "\n" for line in lines))
        self._file.flush()  # another process reads along, and a crash must lose nothing

    def close(self) -> None:
        self._file.close()


class MetricsReader:
    """A reader, in any process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._offset, self._inode = 0, -1
        #: Whether the file had been cut since the call before the latest, which has then returned all of it.
        self.cut = False

    def read(self) -> list[Metric]:
        """The metrics that were appended since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            self.cut = self._inode not in (-1, inode)
            if self.cut:
                self._offset = 0
            self._inode = inode
            file.seek(self._offset)
            data = file.read()
        complete = data.rfind(b"\n") + 1  # the last line may be incomplete
        self._offset += complete
        return [Metric(**json.loads(line)) for line in data[:complete].splitlines()]
