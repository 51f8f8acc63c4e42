"""The processes of one run: starting them, finding them by what they do, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).parents[2]
#: Every process of a run has this variable, also those that no longer have a parent.
_MARK = "RUNNER_FAULTS"
_SHARED_MEMORY = Path("/dev/shm")
#: Temporary folders of torch: a cache, and what torchrun leaves when it is killed.
_OF_TORCH = ("torchinductor_", "torchelastic_")
_OF_JOBLIB = ("joblib", "sem.joblib", "sem.loky")
_OTHER_RUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID")


class Processes:
    """A context for the commands of one run, with a folder for temporary files. At its end all processes are killed."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """`log`: for all output. `environment`: variables besides those of this process."""
        self.log, self._mark = log, uuid.uuid4().hex
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        # Below the usual folder, because the path of a socket in it may have 108 characters.
        self._temporary = tempfile.TemporaryDirectory(prefix="faults-")
        self._memory = _entries(_SHARED_MEMORY)
        own = {_MARK: self._mark, "TMPDIR": self._temporary.name, "PYTHONPATH": str(ROOT)}
        self.environment = {name: value for name, value in os.environ.items() if name not in _OTHER_RUNS}
        self.environment |= {**own, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._temporary.cleanup()

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command, in a session of its own; `-m …` is run by Python."""
        if command[0].startswith("-"):
            command = (sys.executable, *command)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_take_interrupts,
            )

    def kill(self) -> None:
        """Kill what is running, and wait until it has ended."""
        while running := self.all():
            for process in running:
                send(process, signal.SIGKILL)
            time.sleep(0.01)

    def all(self) -> list[psutil.Process]:
        """Every process that is running."""
        return [process for process in psutil.process_iter() if _value(process, _MARK) == self._mark]

    def by_role(self, command: subprocess.Popen[bytes]) -> dict[str, list[psutil.Process]]:
        """The running processes of a command.

        Of `python -m runner`: `parent`, `forkserver` and `worker`; of torchrun: `agent` and `worker`.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(command.pid)
            children = _running(parent.children())
            if "torch.distributed.run" in parent.cmdline():
                return {"agent": [parent], "worker": [child for child in children if _value(child, "RANK")]}
            servers = [child for child in children if "multiprocessing.forkserver" in " ".join(child.cmdline())]
            workers = _running([worker for server in servers for worker in server.children()])
            return {"parent": [parent], "forkserver": servers, "worker": workers}
        return {}

    def left(self, timeout_s: float) -> list[str]:
        """What is still there after this time: kinds of processes, shared memory and temporary files."""
        wait_until(lambda: not self.all() and not self._unused_memory(), timeout_s)
        processes = ["process"] * len(self.all())
        memory = [f"shared memory {_kind(name)}" for name in self._unused_memory()]
        names = [name for name in _entries(Path(self._temporary.name)) if not name.startswith(_OF_TORCH)]
        files = [f"temporary {_kind(name)}" for name in names]
        return [f"left: {one}" for one in sorted({*processes, *memory, *files})]

    def _unused_memory(self) -> list[str]:
        """Shared memory that is new and in no process's use; another program's is so for a moment before and after.

        That of joblib, whose part loky is, belongs to sweeps with several jobs, which no run here is part of.
        """
        new = [name for name in _entries(_SHARED_MEMORY) - self._memory if not name.startswith(_OF_JOBLIB)]
        return [name for name in new if not _in_use(_SHARED_MEMORY / name) and (_SHARED_MEMORY / name).exists()]


def _take_interrupts() -> None:
    """In the new process: a shell that starts this benchmark in the background has made it ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def wait_until(condition: Callable[[], object], timeout_s: float) -> bool:
    """Poll until `condition()` is true; whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.03)
    return True


def _running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def _value(process: psutil.Process, name: str) -> str | None:
    """A variable of a process's environment; None also for a process that has ended."""
    try:
        return process.environ().get(name)
    except psutil.Error:
        return None


def _in_use(file: Path) -> bool:
    """Whether a running process, of any program, has mapped this file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended
            if str(file) in maps.read_text():
                return True
    return False


def _entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def _kind(name: str) -> str:
    """A temporary file's name without its random part."""
    return re.sub("[a-z0-9_]{8}$", "…", name)
