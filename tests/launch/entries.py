"""What the workers of tests/launch do."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

from runner.errors import Preempted, UserError
from runner.launch.local import WorkerContext, WorkerLost
from runner.launch.signals import requests

#: Longer than any test waits.
FOREVER_S = 60.0


def rank_and_size(job: Any, context: WorkerContext) -> Any:
    """Also a result that does not fit into a pipe."""
    return job, context.rank, context.workers, os.environ["LOCAL_RANK"], "x" * 1_000_000


def spins(job: Any, context: WorkerContext) -> str | None:
    """How long OpenMP's threads spin."""
    return os.environ.get("GOMP_SPINCOUNT")


def visible_gpus(job: Any, context: WorkerContext) -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def collects_garbage(job: Any, context: WorkerContext) -> tuple[bool, bool]:
    """Whether it does, and whether it spares what was imported before."""
    return gc.isenabled(), gc.get_freeze_count() > 100_000


def kill_itself(job: int, context: WorkerContext) -> None:
    """Worker `job` is killed; the others fail at once, as they do when a connection breaks."""
    if context.rank == job:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.15)
    raise WorkerLost("connection closed by peer")


def fail(job: str, context: WorkerContext) -> None:
    """Worker 1 fails, and the others after it."""
    if context.rank == 0:
        time.sleep(0.3)
        raise WorkerLost("connection closed by peer")
    raise UserError("a mistake") if job == "user error" else ValueError("broken")


def wait(job: Any, context: WorkerContext) -> None:
    (context.rendezvous / f"waits-{context.rank}").touch()
    time.sleep(FOREVER_S)


def save_when_asked(job: float, context: WorkerContext) -> None:
    """Like training: it needs `job` seconds to save."""
    requests.training = True
    context.tell_training()
    (context.rendezvous / f"waits-{context.rank}").touch()
    deadline = time.monotonic() + FOREVER_S
    while not requests.preempted() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(job)
    raise Preempted(7)


def save_because_of_worker_1(job: Any, context: WorkerContext) -> None:
    """Worker 1 alone gets the signal, and the workers agree without their parent."""
    requests.training = True
    context.tell_training()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.preempted()
    raise Preempted(3)
