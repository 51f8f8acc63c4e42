"""`metrics.jsonl`: every logged metric, one JSON object per line, appended by rank 0 and independent of the tracker.

A value that is not finite is one of the strings `NaN`, `Infinity` and `-Infinity`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runner.errors import RunFailed
from runner.folder.files import strict_json, write_text
from runner.folder.lock import LOCK_FILE, inode
from runner.folder.reading import opened, parse_json
from runner.log import LOG

FILE_NAME = "metrics.jsonl"
#: Bytes of the longest line that is read: a hundred times what the runner writes.
_LINE_LIMIT = 2**16


@dataclass(frozen=True)
class Metric:
    """One value. `step`: optimizer step; `timestamp`: milliseconds since the epoch."""

    key: str
    value: float
    step: int
    timestamp: int


def cut_metrics(folder: Path, step: int) -> None:
    """Remove what was logged after optimizer step `step`, from which the run continues, and lines that are damaged."""
    path = folder / FILE_NAME
    if path.exists():
        with opened(path) as file:
            lines = [line for line, _ in _lines(file) if (metric := _metric(line)) is not None and metric.step <= step]
        write_text(path, b"".join(lines).decode())


def damaged_lines(folder: Path) -> int:
    """The number of lines of a run that are no metrics, and are left out."""
    path = folder / FILE_NAME
    if not path.exists():
        return 0
    with opened(path) as file:
        return sum(_metric(line) is None for line, _ in _lines(file))


def damage_of_metrics(folder: Path) -> str | None:
    """A sentence about the damaged lines of a run; None without any."""
    damaged = damaged_lines(folder)
    return f"{FILE_NAME} has {damaged} damaged line{'s' * (damaged != 1)}, left out" if damaged else None


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Complete lines, and where in the file each ends; of one that is too long the beginning.

    A last line that is not complete is being written, or a crash has cut it off.
    """
    while line := (piece := file.readline(_LINE_LIMIT)):
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(_LINE_LIMIT)
            line += piece[: _LINE_LIMIT - len(line)]
        if piece:
            yield line, file.tell()


class MetricsLog:
    """The writer, on rank 0. It appends to what an earlier part of the run has logged.

    A disk that takes nothing does not end a run: lines wait until it does. What a run logs again is left out: when it
    logs, saves and evaluates in one step, or continues from a checkpoint after which it had evaluated in the same step,
    or had finished an average that was in flight. The first value stays, as it does in MLflow.
    """

    def __init__(self, folder: Path) -> None:
        """Raises RunFailed if the file cannot be opened."""
        self._folder, self._lock = folder, inode(folder / LOCK_FILE)
        path = folder / FILE_NAME
        try:
            # Unbuffered: another process reads along, a crash must lose nothing, and what was not written is known.
            self._file = opened(path, "ab", buffering=0)
            with opened(path) as written:
                end = max((end for _, end in _lines(written)), default=0)
            self._file.truncate(end)  # removes a line that a crash has cut off
            found = MetricsReader(folder).read()
        except OSError as error:
            raise RunFailed(f"{path} cannot be opened ({error.strerror}): repair the folder") from error
        #: The latest step of each metric: of the earlier part of the run, and of this one.
        self._earlier = {metric.key: metric.step for metric in found}
        self._latest = dict(self._earlier)
        self._unwritten = b""
        self._warned = False

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Raises RunFailed if the run's folder is gone, or another folder has taken its place."""
        if inode(self._folder / LOCK_FILE) != self._lock:
            what = f"{self._folder} was removed or moved while the run used it"
            raise RunFailed(f"{what}: resume it where it is now, or start a new run")
        metrics = {
            key: value
            for key, value in metrics.items()
            if step > self._earlier.get(key, -1) and step != self._latest.get(key)
        }
        self._latest.update(dict.fromkeys(metrics, step))
        timestamp = time.time_ns() // 1_000_000
        lines = (
            strict_json({"key": key, "value": value, "step": step, "timestamp": timestamp})
            for key, value in metrics.items()
        )
        self._unwritten += "".join(line + "\n" for line in lines).encode()
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "it was removed")
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._warned:
                self._warned = True
                what = f"{FILE_NAME} cannot be written ({error.strerror})"
                LOG.warning(f"{what}: the run continues, and tries again with each metric")

    def warning(self) -> str | None:
        """One sentence if values are missing in the file."""
        lost = self._unwritten.count(b"\n")
        return f"{FILE_NAME} lacks the last {lost} values, which could not be written" if lost else None

    def close(self) -> None:
        self._file.close()


class MetricsReader:
    """A reader, in any process. Lines that are damaged are left out."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._offset, self._inode = 0, -1
        #: True if the file had been cut since the call before the latest, which has then returned all of it.
        self.cut = False

    def read(self) -> list[Metric]:
        """The metrics that were appended since the last call."""
        if not self._path.exists():
            return []
        with opened(self._path) as file:
            inode = os.fstat(file.fileno()).st_ino
            self.cut = self._inode not in (-1, inode)
            if self.cut:
                self._offset = 0
            self._inode = inode
            file.seek(self._offset)
            found = []
            for line, self._offset in _lines(file):
                if (metric := _metric(line)) is not None:
                    found.append(metric)
        return found


def _metric(line: bytes) -> Metric | None:
    """None if a line is damaged: blank, or with zeros where a crash has lost a block of the file."""
    try:
        content = parse_json(line)
        key, step, timestamp = content["key"], int(content["step"]), int(content["timestamp"])
        key.encode()  # half of a surrogate pair, which JSON can have, is no text
        return Metric(key, float(content["value"]), step, timestamp) if max(step, timestamp) < 2**63 else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
