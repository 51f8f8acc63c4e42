"""What the workers of tests/launch do."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

from runner.errors import Preempted, UserError
from runner.launch.local import Place, WorkerLost
from runner.launch.signals import requests

#: Longer than any test waits.
FOREVER_S = 60.0


def rank_and_size(job: Any, place: Place) -> Any:
    """Also a result that does not fit into a pipe."""
    return job, place.rank, place.workers, os.environ["LOCAL_RANK"], "x" * 1_000_000


def spins(job: Any, place: Place) -> str | None:
    """How long OpenMP's threads spin."""
    return os.environ.get("GOMP_SPINCOUNT")


def collects_garbage(job: Any, place: Place) -> tuple[bool, bool]:
    """Whether it does, and whether it spares what was imported before."""
    return gc.isenabled(), gc.get_freeze_count() > 100_000


def kill_itself(job: int, place: Place) -> None:
    """Worker `job` is killed; the others fail at once, as they do when a connection breaks."""
    if place.rank == job:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.15)
    raise WorkerLost("connection closed by peer")


def fail(job: str, place: Place) -> None:
    """Worker 1 fails, and the others after it."""
    if place.rank == 0:
        time.sleep(0.3)
        raise WorkerLost("connection closed by peer")
    raise UserError("a mistake") if job == "user error" else ValueError("broken")


def wait(job: Any, place: Place) -> None:
    (place.rendezvous / f"waits-{place.rank}").touch()
    time.sleep(FOREVER_S)


def save_when_asked(job: float, place: Place) -> None:
    """Like training: it needs `job` seconds to save."""
    requests.training = True
    place.tell_training()
    (place.rendezvous / f"waits-{place.rank}").touch()
    deadline = time.monotonic() + FOREVER_S
    while not requests.preempted() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(job)
    raise Preempted(7)


def save_because_of_worker_1(job: Any, place: Place) -> None:
    """Worker 1 alone gets the signal, and the workers agree without their parent."""
    requests.training = True
    place.tell_training()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.preempted()
    raise Preempted(3)
