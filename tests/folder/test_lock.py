"""Locks that end with their process: real processes hold them, and are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import UserError
from runner.folder import lock as alive
from runner.folder.lock import end_all, held, is_held
from runner.sweep.resume import close_books, only_one
from tests.sweep.folders import job_in
from tests.sweep.gated import wait_until

HOLD = """
import signal, sys, time
from pathlib import Path
from runner.folder.lock import held
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with held(Path(sys.argv[1])):
    time.sleep(600)
"""


def holder(folder: Path) -> subprocess.Popen[bytes]:
    """A process that holds the folder by now."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)])
    wait_until(lambda: is_held(folder), "nobody holds the folder", 60)
    return process


def test_a_folder_is_held_as_long_as_its_process_lives(tmp_path: Path) -> None:
    """Not before, not by a file that was left, and no longer than until the process is killed."""
    assert not is_held(tmp_path)
    process = holder(tmp_path)
    assert json.loads((tmp_path / alive.LOCK_FILE).read_text())["pid"] == process.pid
    with pytest.raises(BlockingIOError), held(tmp_path):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (tmp_path / alive.LOCK_FILE).exists()
    assert not is_held(tmp_path)
    with held(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def test_jobs_that_go_on_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this machine get SIGTERM, which a job answers in good order; others are named, with their Slurm job."""
    monkeypatch.setattr(alive, "_BY_THEMSELVES_S", 0.1)
    here, there, over = (tmp_path / name for name in ("0", "1", "2"))
    for folder in (here, there, over):
        folder.mkdir()
    process, other = holder(here), holder(there)
    who = {"pid": other.pid, "host": f"not-{socket.gethostname()}", "slurm_job": "4711"}
    (there / alive.LOCK_FILE).write_text(json.dumps(who))
    assert end_all([here, there, over]) == [f"1 on not-{socket.gethostname()}, Slurm job 4711"]
    assert process.wait(10) == 7
    assert is_held(there)
    other.kill()
    other.wait()


def test_a_job_that_lives_is_not_called_killed(tmp_path: Path) -> None:
    """Its books stay open, and its sweep cannot be gone on with until it has ended."""
    lives, died = job_in(tmp_path, "0", "seed=0"), job_in(tmp_path, "1", "seed=1")
    process = holder(lives)
    close_books(tmp_path)
    assert not (lives / "summary.json").exists()
    assert json.loads((died / "summary.json").read_text())["status"] == "KILLED"
    with pytest.raises(UserError, match=r"still running \(seed=0\): wait for them"), only_one(tmp_path):
        pass
    process.kill()
    process.wait()
    with only_one(tmp_path):
        close_books(tmp_path)
    assert json.loads((lives / "summary.json").read_text())["status"] == "KILLED"
