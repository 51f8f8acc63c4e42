"""A lock on a run's folder. The operating system releases it when the process ends, however that happens."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from runner.folder.reading import opened, parse_json

LOCK_FILE = ".lock"
#: Seconds that jobs have to end without a signal (as after Ctrl-C), and then after SIGTERM.
_GRACE_S, _SIGTERM_S = 5.0, 60.0
#: Bytes that are read of what an owner has written.
_OWNER_SIZE = 2**16
#: Attempts at a lock: `is_locked` of another process holds it for a moment.
_TRIES = 5


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, if it is not there, and lock it for this process. Raises BlockingIOError if another process has,
    and UserError for a link.

    Its path is locked too: the lock file is removed with the folder, and is another one in a folder that is made anew.
    """
    with locked_path(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked_inside(folder):
            yield


@contextlib.contextmanager
def locked_path(path: Path) -> Iterator[None]:
    """Lock a path for this process on this machine, whether or not there is something. Raises BlockingIOError.

    By the name of a socket of Linux that no file has, so that nothing is left when the process is killed.
    """
    digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0runner-{os.getuid()}-{digest}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BlockingIOError(error.errno, f"{path} is in use") from error
            # Elsewhere there are no such names: the lock in the folder is left.
        yield


@contextlib.contextmanager
def locked_inside(folder: Path) -> Iterator[None]:
    """Lock a folder that nobody else would make anew. Raises BlockingIOError if another has, UserError for a link."""
    # Opened without truncating it: until the lock is ours the file names its owner.
    with opened(folder / LOCK_FILE, "ab", buffering=0) as lock:
        _take(lock)
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "torchrun": os.environ.get("TORCHELASTIC_RUN_ID"),
        }
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the owner's name
            lock.truncate(0)
            lock.write(json.dumps(owner).encode())
        yield


def _take(lock: IO[bytes]) -> None:
    for remaining in reversed(range(_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not remaining:
                raise
            time.sleep(0.01)


def inode(path: Path) -> int | None:
    """The inode of the file of this name; None if there is none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def is_locked(folder: Path) -> bool:
    """True if a living process holds the folder's lock."""
    path = folder / LOCK_FILE
    if not path.exists():
        return False
    with opened(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def lock_owner(folder: Path) -> dict[str, Any]:
    """The process that has locked the folder last, as it wrote itself down; empty if it could not."""
    try:
        with opened(folder / LOCK_FILE) as lock:
            return dict(parse_json(lock.read(_OWNER_SIZE)))
    except (OSError, ValueError, TypeError):
        return {}


def terminate_all(folders: Sequence[Path]) -> list[str]:
    """End the processes of this machine that hold a lock on these folders; descriptions of those on other machines."""
    wait_until_unlocked(folders, _GRACE_S)
    here, elsewhere = [], []
    for folder in filter(is_locked, folders):
        owner = lock_owner(folder)
        if owner.get("host") == socket.gethostname():
            here.append(folder)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(owner["pid"], signal.SIGTERM)
        else:
            slurm = f", Slurm job {owner['slurm_job']}" if owner.get("slurm_job") else ""
            elsewhere.append(f"{folder.name} on {owner.get('host')}{slurm}")
    wait_until_unlocked(here, _SIGTERM_S)
    return elsewhere


def wait_until_unlocked(folders: Sequence[Path], timeout_s: float = math.inf) -> None:
    """Wait until no process holds a lock on any of these folders."""
    deadline = time.monotonic() + timeout_s
    while any(map(is_locked, folders)) and time.monotonic() < deadline:
        time.sleep(0.1)
