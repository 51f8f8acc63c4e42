"""SIGKILL before every system call of a save that changes a file: there is always a whole checkpoint to go on from.

strace kills the process as the thread that writes the checkpoint enters the call, whatever library makes it. To be
cheap, the ranks of a run are forked from a process that has imported everything.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.faults.records import Trial
from benchmarks.faults.runs import TINY, Place, problems_of
from runner import cli
from runner.launch.local import PRELOADED
from runner.train.checkpoint import FOLDER, newest

#: Those of a save; files that it only reads are left out below.
_CALLS = "openat,mkdir,write,pwrite64,writev,ftruncate,fsync,fdatasync,rename,unlink,unlinkat,rmdir"
_STEPS = 4
_RUN = (*TINY, f"max_steps={_STEPS}", "checkpoint.every_steps=1", "checkpoint.keep=1", "tracking=none", "device=cpu")
#: Workers, the rank that is killed, and in which save: the first, or the second, which also removes the first.
_KILLED = ((1, 0, 1), (1, 0, 2), (2, 0, 2), (2, 1, 2))
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Point:
    """Before the `count`-th `call` of the thread that writes save number `save` of one rank."""

    workers: int
    rank: int
    save: int
    call: str
    count: int

    @property
    def name(self) -> str:
        return f"{self.case}, save {self.save}, {self.call} {self.count}"

    @property
    def case(self) -> str:
        return f"worker {self.rank} of {self.workers}"


def points(place: Place) -> list[Point]:
    """Every point at which a save can be killed, found by tracing one. Makes the uninterrupted runs, too."""
    shutil.rmtree(place.work / "saves", ignore_errors=True)
    found = []
    for workers, rank, save in _KILLED:
        log = place.work / f"{workers}-{rank}-{save}.strace"
        folder = _reference(workers, place)
        shutil.rmtree(folder, ignore_errors=True)
        with _Ranks(workers, _start(workers, folder), folder.with_suffix(".log"), place, (rank, save)) as ranks:
            ranks.trace(["-o", str(log)])
            if set(ranks.wait()) != {0}:
                raise SystemExit(f"the uninterrupted run failed: see {folder.with_suffix('.log')}")
        seen: Counter[str] = Counter()
        for line in log.read_text().splitlines():
            if (traced := re.match(r"(\w+)\(", line)) is None:
                continue  # a signal, or the end of the thread
            call = traced[1]
            seen[call] += 1
            if call != "openat" or "O_CREAT" in line:
                found.append(Point(workers, rank, save, call, seen[call]))
    return found


def saves(point: Point, place: Place) -> Trial:
    """Kill a save at this point, and resume the run."""
    folder = place.work / "saves" / re.sub("[^a-z0-9]+", "-", point.name)
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    with _Ranks(point.workers, _start(point.workers, folder), log, place, (point.rank, point.save)) as ranks:
        ranks.trace(["-o", os.devnull, "-e", f"inject={point.call}:signal=SIGKILL:when={point.count}"])
        killed = ranks.wait(point.rank)
    problems = [] if killed == [-signal.SIGKILL] else [f"exit code {killed[0]} instead of a kill"]
    saved, damaged = newest(folder)
    if damaged:
        problems.append("a damaged checkpoint")
    if (saved.step if saved is not None else 0) not in (point.save - 1, point.save):
        problems.append("no checkpoint" if saved is None else "an older checkpoint")
    with _Ranks(point.workers, [f"resume={folder}"], log, place) as ranks:
        if set(codes := ranks.wait()) != {0}:
            problems.append(f"exit codes {codes} when resumed")
    expected = _reference(point.workers, place)
    problems += problems_of(folder, expected, "bits")
    if [path.name for path in (folder / FOLDER).iterdir()] != [path.name for path in (expected / FOLDER).iterdir()]:
        problems.append("other checkpoints at the end")
    elif _tensors(folder) != _tensors(expected):
        problems.append("other bits in the last checkpoint")
    if not problems:
        shutil.rmtree(folder)
        log.unlink()
    fault = {"target": point.call, "phase": f"save {point.save}"}
    return Trial("saves", point.case, point.name, [fault], problems)


def _start(workers: int, folder: Path) -> list[str]:
    return [*_RUN, f"device.workers={workers}", f"hydra.run.dir={folder}"]


def _reference(workers: int, place: Place) -> Path:
    return place.work / "saves" / f"reference-{workers}"


def _tensors(folder: Path) -> dict[str, bytes]:
    """The last checkpoint's tensors: weights, optimizer, random states, ledger. Their order in the files varies."""
    from safetensors.numpy import load_file

    files = sorted((folder / FOLDER / f"step-{_STEPS:08d}").glob("worker-*/*.safetensors"))
    return {f"{file.parent.name}{name}": value.tobytes() for file in files for name, value in load_file(file).items()}


class _Ranks:
    """The processes of a command as torchrun starts them, forked from a process that has imported everything."""

    def __init__(
        self, workers: int, arguments: Sequence[str], log: Path, place: Place, stop: tuple[int, int] | None = None
    ) -> None:
        """`stop`: a rank and the number of the save that it starts only when it is traced."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, __name__, "runner.run.job", "torch.distributed.checkpoint"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log.parent.mkdir(parents=True, exist_ok=True)
        joining = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**place.environment, **joining, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._gate, child = context.Pipe()
        self._processes = [
            context.Process(
                target=_rank,
                args=(list(arguments), {**environment, "RANK": rank, "LOCAL_RANK": rank}, str(log)),
                kwargs={"gate": child, "save": stop[1]} if stop is not None and stop[0] == rank else {},
            )
            for rank in range(workers)
        ]
        self._tracer: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Ranks:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self._tracer is not None:
            self._tracer.communicate()

    def trace(self, options: Sequence[str]) -> None:
        """Trace the thread that waits to write, and let it go on."""
        assert self._gate.poll(_TIMEOUT_S), "no save"
        command = ["strace", "-p", str(self._gate.recv()), "-e", f"trace={_CALLS}", *options]
        self._tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._tracer.stderr is not None
        attached = self._tracer.stderr.readline()
        assert "attached" in attached, attached
        self._gate.send(None)

    def wait(self, rank: int | None = None) -> list[int | None]:
        """Exit codes of all ranks, or of one: then the others are left to be killed, as torchrun would."""
        chosen = self._processes if rank is None else [self._processes[rank]]
        deadline = time.monotonic() + _TIMEOUT_S
        for process in chosen:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in chosen]


def _rank(
    arguments: list[str], environment: Mapping[str, object], log: str, gate: Connection | None = None, save: int = 0
) -> None:
    """One process of the command."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(number, 1)
    os.dup2(number, 2)
    if gate is not None:
        _stop_before(save, gate)
    sys.exit(cli.main(arguments, time.time()))


def _stop_before(save: int, gate: Connection) -> None:
    """Make the thread that writes this save report itself, and wait for an answer."""
    run, number = threading.Thread.run, itertools.count(1)

    def stopped(thread: threading.Thread) -> None:
        if thread.name == "checkpoint" and next(number) == save:
            gate.send(threading.get_native_id())
            gate.recv()
        run(thread)

    threading.Thread.run = stopped  # type: ignore[method-assign]
