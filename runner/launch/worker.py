"""The entry point of a worker process that trains, and how launched workers find each other."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from runner.backends import Backend
from runner.backends.memory import enough_for
from runner.backends.torch_distributed import long_collectives
from runner.errors import first_line
from runner.folder.record import RunResult
from runner.launch.local import WorkerContext, WorkerLost
from runner.launch.signals import requests
from runner.launch.watchdog import Watchdog
from runner.train.build import Job, WorkerJob, connect, train
from runner.train.loop import Loop


def rendezvous_store(context: WorkerContext) -> dist.Store:
    """Through which the workers of one machine find each other."""
    # They communicate over its loopback interface, and must not be reachable from outside.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback)
    return dist.FileStore(str(context.rendezvous / "workers"), context.workers)


def connect_launched(job: WorkerJob, context: WorkerContext) -> Backend:
    """The device of a launched worker, connected to the other workers of the launch."""
    return connect(job, context.rank, context.workers, context.rank, rendezvous_store(context))


def run_launched(job: dict[str, Any], context: WorkerContext) -> RunResult | None:
    """The entry point of a launched worker that trains. `job`: `Job.as_json()`."""
    store, training = rendezvous_store(context), Job.from_json(job)
    return run(training, context.rank, context.workers, context.rank, store, context.tell_training, context.give_up)


@contextlib.contextmanager
def translate_worker_errors(rank: int, instead: str) -> Iterator[None]:
    """Errors of a worker's libraries, as the parent understands them. `instead`: what to use if memory is too small.

    Raises WorkerLost where the other workers cannot be reached or the device failed, and RunFailed for lack of memory.
    """
    try:
        with enough_for(f"on worker {rank}", instead):
            yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # gloo's errors have no special type
            raise WorkerLost(f"worker {rank} lost the others: {first_line(error)}") from None
        if isinstance(error, torch.AcceleratorError):
            raise WorkerLost(f"the device of worker {rank} failed: {first_line(error)}") from error
        raise


def run(
    job: Job,
    rank: int,
    world_size: int,
    local_rank: int,
    store: dist.Store,
    tell_training: Callable[[], None],
    give_up: Callable[[str], None],
) -> RunResult | None:
    """Train as one of `world_size` workers that find each other through `store`; the result, on rank 0.

    `tell_training`: called when this worker begins to train, from where it can save its state. `give_up`: ends this
    process with a sentence, from any thread. Raises what `translate_worker_errors` raises.
    """

    @contextlib.contextmanager
    def watched(loop: Loop) -> Iterator[None]:
        timeout_s = job.config.launch.timeout_s
        with long_collectives(timeout_s), Watchdog(loop, store, timeout_s, give_up):
            if job.config.checkpoint.on_preemption:
                requests.training, requests.grace_s = True, job.config.launch.grace_s
                tell_training()
            yield

    with translate_worker_errors(rank, "sharding=fsdp, precision=bf16 or a smaller model"):
        backend = connect(job, rank, world_size, local_rank, store)
        result = train(job, backend, watched, requests.preempted)
        backend.close()
    return result
