"""Joining processes that torchrun (or Slurm with torch's environment variables) has started.

Rank 0 plays the parent: it alone composes the configuration, and sends the job to the others through torch's store.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from runner.backends import World
from runner.errors import Preempted, UserError
from runner.folder.lock import LOCK_FILE, lock_owner
from runner.folder.record import RunResult
from runner.launch.local import WorkerFailed, WorkerLost
from runner.launch.signals import EXIT_PREEMPTED, handle_signals, requests
from runner.launch.worker import run
from runner.log import LOG
from runner.train.job import Job

_JOB_KEY = "job"
#: Time in which the other ranks wait for the job: rank 0 may have to prepare a whole data set first.
_JOB_TIMEOUT = datetime.timedelta(hours=2)
#: Seconds between two looks for torchrun's agent.
_AGENT_POLL_S = 1.0


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
        self._note_signals(job)  # first: from here on the others wait for this process
        self.job_sent = True
        self.store.set(_JOB_KEY, json.dumps(job.as_json()))
        result = self._run(job)
        assert result is not None
        return result

    def follow(self) -> int:
        """Wait for rank 0's job and run this rank's part of it; the exit code."""
        requests.training = True  # as in `_note_signals`: rank 0 may be about to train
        handle_signals(exits=True)
        message = json.loads(self.store.get(_JOB_KEY))
        try:
            if message is not None:
                job = Job.from_json(message)
                self._note_signals(job)
                self._run(job)
        except Preempted:
            return EXIT_PREEMPTED
        return 0

    def _note_signals(self, job: Job) -> None:
        """Only note requests to save and end: a worker that ended while it prepares would leave the others waiting."""
        requests.training, requests.grace_s = job.config.checkpoint.on_preemption, job.config.launch.grace_s
        if not requests.training:
            requests.raise_pending()

    def _run(self, job: Job) -> RunResult | None:
        try:
            return run(job, World(self.rank, self.world_size, self.local_rank, job.local_workers, self.store), self)
        except WorkerLost as error:
            raise WorkerFailed(str(error)) from None  # torchrun starts workers again, not this process

    def tell_training(self) -> None:
        """Nobody asks: signals come to each process."""

    def give_up(self, why: str) -> NoReturn:
        """End this process because another worker is missing."""
        LOG.error(why)
        sys.stderr.flush()
        os._exit(1)

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
    store = dist.PrefixStore(_agree_on_prefix(store, rank, world_size), store)
    return ExternalWorld(rank, world_size, int(os.environ["LOCAL_RANK"]), store)


def _agree_on_prefix(store: dist.Store, rank: int, world_size: int) -> str:
    """A prefix for this start of the workers, the same on all.

    torchrun keeps the store when it starts workers again, and not all restarts are counted in their environment. So
    every process asks rank 0, under its own name, and rank 0 answers whoever asks until all have joined.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"ask/{rank}", own)
        prefix: str = store.get(f"answer/{own}").decode()
        store.set(f"{prefix}/joined/{rank}", "")
        return prefix
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"ask/{other}"]):  # perhaps the question of an earlier start
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", own)
            if store.check([f"{own}/joined/{other}"]):
                missing.remove(other)
        time.sleep(0.01)
    return own


def belongs_to_this_torchrun(folder: Path) -> bool:
    """True if the run in `folder` was started by workers of the torchrun that has started this process.

    It has the same id, and was started after torchrun's agent on this host: an id can be used twice.
    """
    run_id, agent_started, lock = os.environ.get("TORCHELASTIC_RUN_ID"), _started_at(os.getppid()), folder / LOCK_FILE
    if run_id is None or agent_started is None or not lock.exists() or lock.stat().st_mtime < agent_started:
        return False
    return bool(lock_owner(folder).get("torchrun") == run_id)


def _started_at(pid: int) -> float | None:
    """When a process started, in seconds since the epoch; None if this system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        (boot,) = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")]
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    return None


def _end_with_agent(agent: int) -> None:
    """End this process when torchrun's agent was killed, and could not: it saves its state first if it trains.

    `agent`: the parent process, which is another program if the agent was killed before this process asked.
    """
    while os.getppid() == agent and _may_be_agent(agent):
        time.sleep(_AGENT_POLL_S)
    if requests.training:
        if not requests.preempted():  # a second request would end this process without saving
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(requests.grace_s)
    os._exit(EXIT_PREEMPTED)


def _may_be_agent(pid: int) -> bool:
    """True if a process runs Python, if torchrun has started this one and the system tells."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return not Path("/proc/self").exists()  # it has just ended, or this is not Linux


def run_as_rank(command: Callable[[ExternalWorld], int]) -> int:
    """Run `command` on rank 0, and the job that it sends on all other ranks; the exit code."""
    threading.Thread(target=_end_with_agent, args=(os.getppid(),), daemon=True).start()
    world = join_external()
    if world.rank != 0:
        return world.follow()
    with world.release_others():
        return command(world)
