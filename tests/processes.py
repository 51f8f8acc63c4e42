"""Commands as processes: starting them, waiting for what they write, and counting the processes that are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
#: Generous, since a busy machine can be ten times slower: a command that works never takes that long.
TIMEOUT_S = 480.0

_started: list[subprocess.Popen[bytes]] = []


def start(root: Path, *command: str, keep: bool = False, **environment: str) -> subprocess.Popen[bytes]:
    """A command in a session of its own, whose output goes to `output.txt`. `-m …` and `-c …` are run by Python.

    `keep`: it is not killed at the end of the test.
    """
    if command[0].startswith("-"):
        command = (sys.executable, *command)
    with (root / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )
    if not keep:
        _started.append(process)
    return process


def output(root: Path) -> str:
    return (root / "output.txt").read_text()


def kill_started() -> None:
    while _started:
        process = _started.pop()
        if process.poll() is None:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all its processes."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(condition: Callable[[], object], otherwise: str, timeout_s: float = TIMEOUT_S) -> None:
    """Poll until `condition()` is true. Raises AssertionError, with `otherwise`, after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def wait_for(root: Path, pattern: str, process: subprocess.Popen[bytes], empty: bool = False) -> Path:
    """The first file below `root` that matches, once there is one with content, or, with `empty`, any."""
    found: list[Path] = []

    def exists() -> bool:
        assert process.poll() is None, output(root)
        found.extend(path for path in root.glob(pattern) if empty or path.stat().st_size > 0)
        return bool(found)

    wait_until(exists, f"no {pattern}: {root}")
    return found[0]


def wait_for_gate(root: Path, step: int, process: subprocess.Popen[bytes], job: int = 0) -> None:
    """Wait until a run of tests/tools/sweep/gated.py is held before this step."""
    wait_for(root, f"at-{job}-{step}", process, empty=True)


def processes_of_session(leader: int) -> list[int]:
    """Running processes of a session, other than zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def children(parent: int) -> list[int]:
    """The processes that a process has started and that still run, the oldest first."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def left_of_session(leader: int) -> list[int]:
    """Processes that still run 20 seconds after the session's leader has ended."""
    deadline = time.monotonic() + 20
    while (left := processes_of_session(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
