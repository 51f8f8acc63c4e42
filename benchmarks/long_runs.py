"""What benchmarks share that train for hours: the commit that they measure, and a clean end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from runner.track.card import git_commit

_ROOT = Path(__file__).parents[1]


def commit() -> str:
    """The runner's commit, with a plus sign if its files are not those of that commit."""
    command = ["git", "-C", str(_ROOT), "status", "--porcelain", "--", "runner", "recipes", "conf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{(git_commit() or 'unknown')[:12]}{'+' if done.stdout.strip() else ''}"


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A `kill` of this process ends it as Ctrl-C does, and so ends the run that it waits for."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
