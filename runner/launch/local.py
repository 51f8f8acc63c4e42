"""Start the workers of a job on this machine, one process each, and wait for them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from runner.errors import OutOfMemory, Preempted, RunFailed, UserError
from runner.folder.lock import LOCK_FILE, is_locked, locked_inside
from runner.launch.cleanup import FOLDER
from runner.launch.signals import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    INTERRUPTIONS,
    PREEMPTIONS,
    handle_signals,
    requests,
    signals_ignored,
)
from runner.log import LOG

#: Modules that every worker imports. The forkserver imports it once, while the parent composes the configuration.
PRELOADED = [
    "runner.launch.cleanup",
    "runner.launch.worker",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "torch.optim.adamw",
]
#: A module that rank 0 imports for the first evaluation: a second that a single run spends after its first step. It
#: brings joblib, without which a worker cannot be forked for a job of the joblib launcher: that has another start
#: method.
PRELOADED_FOR_SEVERAL = ["sklearn.metrics"]

#: Read when a process starts, unless the user has set them. By glibc: large blocks are mapped anew in each step, which
#: takes no longer in huge pages. By GNU OpenMP: a thread that waits for the others would keep its core for 300,000
#: turns, in which they cannot have it where another program is running (benchmarks/results/busy-machine.md).
_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "GOMP_SPINCOUNT": "1000"}

#: Exit code of a child whose forkserver has ended, so that its own exit code cannot be known.
_FORKSERVER_ENDED = 255
_FORKSERVER_KILLED = "the process that starts the workers (multiprocessing's forkserver) was killed"
#: Seconds between two looks at the parent's signals, and in which the cause of a failure is looked for: when a worker
#: is killed, the others fail at their next collective, and may be noticed first.
_POLL_S, _CAUSE_S = 0.1, 1.0
#: Prefix of the names of temporary folders: one that nobody gives to a run, whose folder has a lock too. The path of a
#: socket in it may have 107 characters.
_PREFIX = ".runner-"
#: Seconds after which a temporary folder that no process has locked was left behind.
_ABANDONED_S = 60.0

#: Set in the environment of workers: they are forked from the forkserver, and would have that of its start.
_of_workers: dict[str, str] = {}

#: The lock of this process's temporary folder; the operating system releases it when the process ends.
_lock = contextlib.ExitStack()

#: Kinds of messages from a worker to its parent.
_TRAINING, _RESULT, _SAVED, _KNOWN, _FAILED, _LOST = "training", "result", "saved", "known", "failed", "lost"


class WorkerFailed(Exception):
    """A worker ended with an unexpected error. The message holds its traceback."""


class WorkerLost(WorkerFailed):
    """A worker was killed, or workers could not reach each other: trying again can help."""


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place among the `workers` of a launch. `rendezvous`: a folder of the launch, where they meet."""

    rank: int
    workers: int
    rendezvous: Path
    pipe: Connection

    def tell_training(self) -> None:
        """Tell the parent that this worker can save its state if it is preempted."""
        self.pipe.send((_TRAINING, None))

    def give_up(self, why: str) -> NoReturn:
        """End this process because another worker is missing."""
        self.pipe.send((_LOST, (time.time_ns(), why)))
        _exit(1)


#: The function that a worker runs.
Entry = Callable[[Any, WorkerContext], Any]


@functools.cache
def _own_folder(pid: int) -> Path:
    """A temporary folder of this process, for the forkserver's socket, its launches and other short-lived files."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):  # of processes that were killed
        with contextlib.suppress(OSError):
            old = time.time() - path.stat().st_mtime > _ABANDONED_S and (path / LOCK_FILE).exists()
            if old and not is_locked(path):
                shutil.rmtree(path, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    _lock.enter_context(locked_inside(folder))
    multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
    atexit.register(cleanup_process)
    return folder


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder, as a context. If this process is killed, another command removes it."""
    return tempfile.TemporaryDirectory(dir=_own_folder(os.getpid()), ignore_cleanup_errors=True)


def _forkserver_pid() -> int | None:
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _forkserver_runs() -> bool:
    """True if this process's forkserver holds its end of the pipe by which it notices the end of this process."""
    alive: int | None = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    if alive is None:
        return False
    poll = select.poll()
    poll.register(alive, select.POLLHUP)
    return not poll.poll(0)


def cleanup_process() -> None:
    """Remove the temporary folder and end the forkserver, which may still be importing, before this process exits.

    In this order: if this process is killed meanwhile, the forkserver removes the folder.
    """
    shutil.rmtree(_own_folder(os.getpid()), ignore_errors=True)
    if (pid := _forkserver_pid()) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start_forkserver(several_jobs: bool = False) -> None:
    """Start the process that workers are forked from, which all jobs of a command share.

    `several_jobs`: the command may run more than one.

    It imports torch and the model code while the parent composes the configuration, so that a worker starts with
    everything imported. It never runs a kernel: a process that has run one cannot be forked safely.
    """
    if _forkserver_runs():
        return
    # Not torch_xla: importing it replaces layers and functions of torch, for workers on the CPU as well.
    multiprocessing.set_forkserver_preload([*PRELOADED, *(PRELOADED_FOR_SEVERAL if several_jobs else ())])
    unset = _ENVIRONMENT.keys() - os.environ.keys()
    if "OMP_WAIT_POLICY" in os.environ:  # the user's choice of the same
        unset.discard("GOMP_SPINCOUNT")
    own = {FOLDER: str(_own_folder(os.getpid())), **{name: _ENVIRONMENT[name] for name in unset}}
    os.environ.update(own)
    resource_tracker.ensure_running()  # starting it would unblock the signals below
    # The server imports from its current folder first, where a user's `runner.py` would take the place of this package.
    # Workers change back to this process's folder. Commands come here before they start threads, which would see it.
    here = os.getcwd()
    os.chdir(Path(__file__).parents[2])
    # It inherits the mask: the parent answers what is sent to all processes, and a worker unblocks its signals once it
    # can answer them. What a scheduler sends to the server alone it passes on (launch/cleanup.py).
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*INTERRUPTIONS, *PREEMPTIONS})
    try:
        forkserver.ensure_running()
    finally:
        for name in own:
            del os.environ[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.chdir(here)


@contextlib.contextmanager
def workers_see(gpus: Sequence[str]) -> Iterator[None]:
    """Hide other GPUs than these, named as in `CUDA_VISIBLE_DEVICES`, from workers that are launched meanwhile.

    This process sees the same as before: CUDA would not notice a change once it is initialised.
    """
    _of_workers["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield
    finally:
        del _of_workers["CUDA_VISIBLE_DEVICES"]


def launch(entry: Entry, job: Any, workers: int, grace_s: float = 0.0) -> Any:
    """Run `entry(job, context)` in `workers` processes; rank 0's result.

    `grace_s`: seconds that preempted workers have to save their state.

    Raises UserError for a mistake that only a worker could find, RunFailed, WorkerLost, WorkerFailed for any other
    error, and KeyboardInterrupt or Preempted when the launch is interrupted. No worker is left then.
    """
    start_forkserver()
    killed_before = _killed_for_memory()
    with temporary_folder() as rendezvous:
        launched: list[_Worker] = []
        try:
            for rank in range(workers):
                launched.append(_Worker.start(rank, workers, rendezvous))
            with requests.noted():
                for worker in launched:  # until now an interrupted launch leaves nothing that has begun
                    worker.begin(entry, job)
                _wait(launched, grace_s)
        finally:
            with signals_ignored():
                for worker in launched:
                    worker.end()
        if failure := _failure(launched, for_memory=_killed_for_memory() > killed_before):
            raise failure
        return next(worker.messages[_RESULT] for worker in launched if worker.rank == 0)


@dataclass
class _Worker:
    """A worker, as its parent sees it. `messages`: the latest of each kind. `closed`: it can send no more."""

    rank: int
    process: Any
    pipe: Connection
    messages: dict[str, Any] = field(default_factory=dict)
    killed: bool = False
    closed: bool = False

    @staticmethod
    def start(rank: int, workers: int, rendezvous: str) -> _Worker:
        context = multiprocessing.get_context("forkserver")
        own, theirs = context.Pipe()
        start = (rank, workers, rendezvous, theirs, dict(_of_workers))
        process = context.Process(target=_work, args=start, name=f"worker {rank}")
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise WorkerLost(_FORKSERVER_KILLED) from error
        theirs.close()
        return _Worker(rank, process, own)

    def begin(self, entry: Entry, job: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.pipe.send((entry, job))

    def listen(self) -> None:
        while not self.closed:
            try:
                if not self.pipe.poll():
                    return
                kind, content = self.pipe.recv()
            except (EOFError, OSError):
                self.closed = True
                return
            self.messages[kind] = content

    @property
    def exit_code(self) -> int | None:
        code: int | None = self.process.exitcode
        return code

    @property
    def preempted(self) -> bool:
        """True if it has ended because it was asked to, by the parent or from outside."""
        return self.exit_code == EXIT_PREEMPTED

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def end(self) -> None:
        """Make sure that the process is gone."""
        self.pipe.close()
        if self.exit_code is None or self.exit_code == _FORKSERVER_ENDED:
            self.killed = True
            self.signal(signal.SIGKILL)
        self.process.join()


def _wait(workers: Sequence[_Worker], grace_s: float) -> None:
    """Wait until all workers have ended, or one has failed. Raises KeyboardInterrupt or Preempted."""
    forwarded = False
    while running := [worker for worker in workers if worker.exit_code is None]:
        pipes = [worker.pipe for worker in running if not worker.closed]
        connection.wait([*(worker.process.sentinel for worker in running), *pipes], _POLL_S)
        preempted = [worker for worker in workers if worker.preempted]  # looked up first: all that they sent is there
        for worker in workers:
            worker.listen()
        if any(worker.exit_code not in (None, 0) and not worker.preempted for worker in workers):
            return _wait_for_cause(workers)
        ended_early = any(_SAVED not in worker.messages for worker in preempted)
        if requests.at_once or ended_early:
            break
        if preempted and not requests.preempted():
            requests.preempted_at, forwarded = time.monotonic(), True  # the workers have agreed without this process
        if requests.preempted_at is None:
            continue
        if time.monotonic() - requests.preempted_at > grace_s or not any(_TRAINING in one.messages for one in workers):
            break
        if not forwarded:
            forwarded = True
            LOG.info("preempted: the workers save their state; Ctrl-C ends them at once")
            for worker in running:
                worker.signal(signal.SIGUSR1)
    for worker in workers:
        worker.listen()
    saved = [worker.messages[_SAVED] for worker in workers if _SAVED in worker.messages]
    if saved or running:
        if not requests.preempted() and requests.at_once:
            raise KeyboardInterrupt
        raise Preempted(saved[0] if saved and not running else None)
    return None


def _wait_for_cause(workers: Sequence[_Worker]) -> None:
    """Wait a moment for workers that have ended before the one that was noticed."""
    deadline = time.monotonic() + _CAUSE_S
    while time.monotonic() < deadline and any(worker.exit_code is None for worker in workers):
        time.sleep(_POLL_S / 10)
    for worker in workers:
        worker.listen()


def _killed_for_memory() -> int:
    """The number of processes that were killed so far because a container, or the machine, had no memory left."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:  # not Linux
        return 0
    return int(counters.get("oom_kill", 0))


def _failure(workers: Sequence[_Worker], for_memory: bool) -> BaseException | None:
    """The exception for failed workers: a reason that one knows, else what the others' failures followed from.

    `for_memory`: whether a process was killed meanwhile because there was no memory left.
    """
    for worker in workers:
        if _KNOWN in worker.messages:
            known: Exception = worker.messages[_KNOWN]
            return known
    failed = [worker for worker in workers if not worker.killed and worker.exit_code != 0]
    if any(worker.exit_code == EXIT_INTERRUPTED for worker in failed):
        return KeyboardInterrupt()
    for worker in failed:
        assert worker.exit_code is not None
        if worker.exit_code < 0:
            number = -worker.exit_code
            if number == signal.SIGKILL and for_memory:
                return OutOfMemory(f"worker {worker.rank} was killed because there was no memory left")
            return WorkerLost(f"worker {worker.rank} ended with signal {number}")
    for kind, error in ((_FAILED, WorkerFailed), (_LOST, WorkerLost)):
        found = sorted((worker.messages[kind], worker.rank) for worker in failed if kind in worker.messages)
        if found:
            (_, text), rank = found[0]
            return error(text if kind == _LOST else f"worker {rank} failed\n{text}")
    if any(worker.exit_code == _FORKSERVER_ENDED for worker in workers):
        return WorkerLost(_FORKSERVER_KILLED)
    for worker in failed:
        return WorkerLost(f"worker {worker.rank} ended with exit code {worker.exit_code} and without a message")
    return None


# --- in the worker -------------------------------------------------------------------------------------------


def _work(rank: int, workers: int, rendezvous: str, pipe: Connection, environment: dict[str, str]) -> None:
    """A worker's process, from its start to its exit code."""
    context = WorkerContext(rank, workers, Path(rendezvous), pipe)
    handle_signals(exits=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*INTERRUPTIONS, *PREEMPTIONS})
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_WORLD_SIZE=str(workers))
    try:
        entry, job = pipe.recv()
    except EOFError:  # the launch was interrupted before it began
        _exit(EXIT_INTERRUPTED)
    try:
        result = entry(job, context)
        pipe.send((_RESULT, result if rank == 0 else None))
    except Preempted as request:
        pipe.send((_SAVED, request.step))
        _exit(EXIT_PREEMPTED)
    except (UserError, RunFailed) as error:
        pipe.send((_KNOWN, error))
        _exit(1)
    except WorkerLost as error:
        pipe.send((_LOST, (time.time_ns(), str(error))))
        _exit(1)
    except Exception:  # noqa: BLE001 - the parent reports it
        pipe.send((_FAILED, (time.time_ns(), traceback.format_exc())))
        _exit(1)


def _exit(code: int) -> NoReturn:
    # At once: a process group that has lost a member can hang in its destructor.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_with_parent() -> None:
    """Exit when the process that launched this one has ended: if it was killed, it cannot stop its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(128 + signal.SIGKILL)
