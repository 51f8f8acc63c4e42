"""The entry point of a worker process: join the other workers, train, and report what went wrong."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from runner.errors import Diverged, RunFailed, UserError
from runner.folder.files import write_json
from runner.launch.elastic import ERROR_PREFIX
from runner.train.build import Job, connect, train
from runner.train.result import RunResult


@dataclass(frozen=True)
class Rank:
    """A launched worker's rank, and the store of its launch."""

    rank: int
    world_size: int
    local_rank: int
    store: dist.Store


@contextlib.contextmanager
def launched(rendezvous: str) -> Iterator[Rank]:
    """Be a worker under torch's elastic launcher, which sets rank and world size in the environment.

    `rendezvous`: a folder of this launch, for the workers' store and for their errors.
    """
    signal.signal(signal.SIGINT, exit_on_signal)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # Workers of one machine communicate over its loopback interface, and must not be reachable from outside.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(Path(rendezvous) / "workers"), world_size)
    try:
        yield Rank(rank, world_size, int(os.environ["LOCAL_RANK"]), store)
    except Exception as error:
        failure = {
            "rank": rank,
            "time_ns": time.time_ns(),
            "user_error": isinstance(error, UserError),
            "run_failed": isinstance(error, RunFailed),
            "diverged": isinstance(error, Diverged),
            "message": str(error),
            "trace": traceback.format_exc(),
        }
        write_json(Path(rendezvous) / f"{ERROR_PREFIX}{rank}.json", failure)
        raise


def run_launched(job: dict[str, Any], rendezvous: str) -> RunResult | None:
    """The entry point of a launched worker that trains. `job`: `Job.as_json()`."""
    with launched(rendezvous) as own:
        return run(Job.from_json(job), own.rank, own.world_size, own.local_rank, own.store)


def run(job: Job, rank: int, world_size: int, local_rank: int, store: dist.Store) -> RunResult | None:
    """Train as one of `world_size` workers that find each other through `store`; the result, on rank 0."""
    backend = connect(job, rank, world_size, local_rank, store)
    result = train(job, backend)
    backend.close()
    return result


def _exit_with_parent() -> None:
    """Exit when the process that launched this one has ended: if it was killed, it cannot stop its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(128 + signal.SIGKILL)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Exit without a message: Ctrl-C reaches the whole process group, and the parent answers it."""
    os._exit(128 + number)
