"""The progress of a long evaluation, for the parent process: a small file in the run's folder."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from runner.folder.files import write_json

#: Hidden files are not uploaded to a tracking store.
_FILE = ".evaluation"
#: Seconds between two updates; a shorter evaluation writes nothing.
_NOTE_EVERY = 1.0


class EvalProgress:
    """The writer, on rank 0."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Report rank 0's micro-batches: first with `done` = 0, last with `done` = `total`."""
        now = time.monotonic()
        if done == 0:
            self._next = now + _NOTE_EVERY
        elif done == total:
            (self._folder / _FILE).unlink(missing_ok=True)
        elif now >= self._next:
            self._next = now + _NOTE_EVERY
            write_json(self._folder / _FILE, [done, total])


def evaluation_under_way(folder: Path) -> tuple[int, int] | None:
    """Micro-batches of rank 0, done and in total; None unless a long evaluation is running."""
    with contextlib.suppress(FileNotFoundError):
        done, total = json.loads((folder / _FILE).read_text())
        return done, total
    return None
