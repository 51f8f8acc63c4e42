"""Whether a process still works in a folder: it holds a lock there, which ends with it, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LOCK_FILE = ".lock"
#: Seconds that jobs have to end by themselves, as they do on Ctrl-C, and then after they were told to.
_BY_THEMSELVES_S, _WHEN_TOLD_S = 5.0, 30.0


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder for this process. Raises BlockingIOError if another one does."""
    # Not truncated before it is ours: it says who holds it.
    with (folder / LOCK_FILE).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "slurm_job": os.environ.get("SLURM_JOB_ID")}
        lock.write(json.dumps(who))
        lock.flush()
        yield


def is_held(folder: Path) -> bool:
    """Whether a process that still lives holds the folder."""
    path = folder / LOCK_FILE
    if not path.exists():
        return False
    with path.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def end_all(folders: Sequence[Path]) -> list[str]:
    """End the processes of this machine that hold these folders, in good order; those on others, in words."""
    _wait(folders, _BY_THEMSELVES_S)
    here, elsewhere = [], []
    for folder in filter(is_held, folders):
        who = json.loads((folder / LOCK_FILE).read_text() or "{}")
        if who.get("host") == socket.gethostname():
            here.append(folder)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(who["pid"], signal.SIGTERM)
        else:
            slurm = f", Slurm job {who['slurm_job']}" if who.get("slurm_job") else ""
            elsewhere.append(f"{folder.name} on {who.get('host')}{slurm}")
    _wait(here, _WHEN_TOLD_S)
    return elsewhere


def wait_for(folders: Sequence[Path]) -> None:
    """Wait until no process holds one of these folders."""
    _wait(folders, math.inf)


def _wait(folders: Sequence[Path], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_held, folders)) and time.monotonic() < deadline:
        time.sleep(0.1)
