"""The progress of a long phase of a worker, for the parent process: a small file in the run's folder."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import NamedTuple

from runner.errors import RunFailed
from runner.folder.files import write_json

#: Hidden files are not uploaded to a tracking store.
FILE_NAME = ".progress"
#: Seconds between two updates; a shorter phase writes nothing.
_NOTE_EVERY = 1.0


class Phase(NamedTuple):
    """`name`: such as `evaluating`. `done`, `total`: of `unit`, such as `batches`."""

    name: str
    done: int
    total: int
    unit: str


class PhaseProgress:
    """The writer of one phase, on rank 0."""

    def __init__(self, folder: Path, name: str, unit: str) -> None:
        self._folder, self._name, self._unit = folder, name, unit
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Report progress: first with `done` = 0, last with `done` = `total`."""
        now = time.monotonic()
        if done == 0:
            self._next = now + _NOTE_EVERY
            return
        with contextlib.suppress(RunFailed, OSError):  # progress that cannot be shown ends no run
            if done == total:
                (self._folder / FILE_NAME).unlink(missing_ok=True)
            elif now >= self._next:
                self._next = now + _NOTE_EVERY
                write_json(self._folder / FILE_NAME, Phase(self._name, done, total, self._unit))


def phase_under_way(folder: Path) -> Phase | None:
    """The phase that rank 0 is in; None unless it is a long one."""
    with contextlib.suppress(FileNotFoundError):
        return Phase(*json.loads((folder / FILE_NAME).read_text()))
    return None
