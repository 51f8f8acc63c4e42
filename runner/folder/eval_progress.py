"""How far a long evaluation is, for who watches the run from another process: a small file in the run's folder."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from runner.folder.files import write_json

#: With a dot: not brought to a tracking store.
_FILE = ".evaluation"
#: Seconds until an evaluation is long, and between two notes.
_NOTE_EVERY = 1.0


class EvalProgress:
    """The writing end, on rank 0. Nothing is written of an evaluation that is over within a second."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Note micro-batches of rank 0: called with none done at first, and with all of them at last."""
        now = time.monotonic()
        if done == 0:
            self._next = now + _NOTE_EVERY
        elif done == total:
            (self._folder / _FILE).unlink(missing_ok=True)
        elif now >= self._next:
            self._next = now + _NOTE_EVERY
            write_json(self._folder / _FILE, [done, total])


def evaluation_under_way(folder: Path) -> tuple[int, int] | None:
    """Micro-batches of rank 0 that are done, and how many there are; None while no long evaluation goes on."""
    with contextlib.suppress(FileNotFoundError):
        done, total = json.loads((folder / _FILE).read_text())
        return done, total
    return None
