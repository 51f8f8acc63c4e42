"""Commands as processes of their own: starting them, waiting for what they write, and counting who is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def statuses(root: Path) -> list[str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{root / 'outputs' / 'mlflow.db'}")
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return [run.info.status for run in found]


_started: list[subprocess.Popen[str]] = []


def start(root: Path, *command: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    _started.append(process)
    return process


def end_started() -> None:
    """End what a failed test has started and not ended: all that come later would share the cores with it."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start_noted(root: Path, *arguments: str, apart: bool = True) -> subprocess.Popen[bytes]:
    """Python with these arguments, in a session of its own; what it says is added to `out.txt` and `err.txt`.

    `apart`: otherwise all of it goes to `said.txt`.
    """
    names = ("out.txt", "err.txt") if apart else ("said.txt", "said.txt")
    with (root / names[0]).open("ab") as out, (root / names[1]).open("ab") as err:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=root,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )


def wait_for(path: Path, pattern: str, process: subprocess.Popen[str]) -> Path:
    """The first file under `path` that matches, once there is one with content."""
    for _ in range(3600):
        found = [p for p in path.glob(pattern) if p.stat().st_size > 0]
        if found:
            return found[0]
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} under {path}")


def alive_in_session(leader: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def still_alive_in_session(leader: int) -> list[int]:
    """Those that still run a few seconds after the leader has ended: ending takes a process a moment."""
    for _ in range(100):
        if not alive_in_session(leader):
            break
        time.sleep(0.05)
    return alive_in_session(leader)
