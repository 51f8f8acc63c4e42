"""Joining processes that torchrun (or Slurm with torch's environment variables) has started.

Rank 0 plays the parent: it alone composes the configuration, and sends the job to the others through torch's store.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist

from runner.errors import UserError
from runner.launch.worker import exit_on_signal, run
from runner.train.build import Job
from runner.train.result import RunResult

_JOB_KEY = "runner/job"
#: How long the other ranks wait for the job: rank 0 may have to tokenise a whole data set first.
_JOB_TIMEOUT = datetime.timedelta(hours=2)


@dataclass
class ExternalWorld:
    """This process's rank, and the store through which rank 0 sends the job. `job_sent`: on rank 0."""

    rank: int
    world_size: int
    local_rank: int
    store: dist.Store
    job_sent: bool = False

    def train(self, job: Job) -> RunResult:
        """Send the job to the other ranks and run rank 0's part of it."""
        self.store.set(_JOB_KEY, json.dumps(job.as_json()))
        self.job_sent = True
        result = run(job, self.rank, self.world_size, self.local_rank, self.store)
        assert result is not None
        return result

    def follow(self) -> None:
        """Wait for rank 0's job and run this rank's part of it."""
        signal.signal(signal.SIGINT, exit_on_signal)
        message = json.loads(self.store.get(_JOB_KEY))
        if message is not None:
            run(Job.from_json(message), self.rank, self.world_size, self.local_rank, self.store)

    @contextlib.contextmanager
    def release_others(self) -> Iterator[None]:
        """Let the other ranks exit when the block ends without a job: rank 0 reports the reason."""
        try:
            yield
        finally:
            if not self.job_sent:
                self.store.set(_JOB_KEY, json.dumps(None))


def join_external() -> ExternalWorld:
    """Rendezvous at MASTER_ADDR and MASTER_PORT. Raises UserError where these are not set."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set but {', '.join(missing)} is not: start the processes with torchrun"
        )
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    store.set_timeout(_JOB_TIMEOUT)
    return ExternalWorld(rank, world_size, int(os.environ["LOCAL_RANK"]), store)


def run_as_rank(command: Callable[[ExternalWorld], int]) -> int:
    """Run `command` on rank 0, and the job that it sends on all other ranks; the exit code."""
    world = join_external()
    if world.rank != 0:
        world.follow()
        return 0
    with world.release_others():
        return command(world)
