"""Locks that end with their process, held by real processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.folder import lock as module
from runner.folder.lock import LOCK_FILE, is_locked, locked, terminate_all

HOLD = """
import signal, sys, time
from pathlib import Path
from runner.folder.lock import locked
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def lock_holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder's lock, killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with lock_holder(tmp_path) as process:
        assert is_locked(tmp_path)
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == process.pid
        with pytest.raises(BlockingIOError), locked(tmp_path):
            pass
    assert (tmp_path / LOCK_FILE).exists()
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert not is_locked(tmp_path)


def test_a_folder_that_is_made_anew_is_still_locked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with lock_holder(folder):
        shutil.rmtree(folder)
        with pytest.raises(BlockingIOError), locked(folder):
            pass
        assert not folder.exists()
    with locked(folder):
        assert is_locked(folder)


def test_terminate_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this machine get SIGTERM; those of other machines are listed with their Slurm job."""
    monkeypatch.setattr(module, "_GRACE_S", 0.0)
    here, elsewhere, unlocked = (tmp_path / name for name in ("0", "1", "2"))
    for folder in (here, elsewhere, unlocked):
        folder.mkdir()
    host = f"not-{socket.gethostname()}"
    with lock_holder(here) as process, lock_holder(elsewhere) as other:
        (elsewhere / LOCK_FILE).write_text(json.dumps({"pid": other.pid, "host": host, "slurm_job": "4711"}))
        assert terminate_all([here, elsewhere, unlocked]) == [f"1 on {host}, Slurm job 4711"]
        assert process.wait(10) == 7
        assert is_locked(elsewhere)
