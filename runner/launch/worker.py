"""The entry point of a worker process that trains, and how workers find each other."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from runner.backends import Backend, World, build_backend
from runner.backends.machine import CoreWaits
from runner.backends.memory import enough_for
from runner.backends.torch_distributed import long_collectives
from runner.config.choices import ShardingKind
from runner.data.cache import Cache
from runner.errors import first_line
from runner.folder.evaluation_rows import KeptRows
from runner.folder.metrics_log import MetricsLog
from runner.folder.phase_progress import PhaseProgress
from runner.folder.record import RunResult
from runner.launch.local import WorkerContext, WorkerLost
from runner.launch.signals import requests
from runner.launch.watchdog import Watchdog
from runner.train.build import build_loop
from runner.train.checkpoint import Checkpoints
from runner.train.finish import RunFiles, finish, require_space_for_model, write_ledger
from runner.train.hooks import Hooks, Paused
from runner.train.identical import make_deterministic
from runner.train.identity import job_identity
from runner.train.job import Job, WorkerJob
from runner.train.profile import Profiler


def rendezvous_store(context: WorkerContext) -> dist.Store:
    """Through which the workers of one machine find each other."""
    # They communicate over its loopback interface, and must not be reachable from outside.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback)
    return dist.FileStore(str(context.rendezvous / "workers"), context.workers)


def connect(job: WorkerJob, world: World) -> Backend:
    """This worker's device, connected to the other workers."""
    torch.set_num_threads(job.threads)
    if job.config.equivalence.is_identical:
        make_deterministic(job.device_type)
    return build_backend(
        job.device_type,
        world,
        cache=Cache(job.config.cache_dir).root,
        threads=job.threads,
        timeout_s=job.config.launch.timeout_s,
        offloads=job.config.sharding.kind is ShardingKind.fsdp_offload,
    )


def launched_world(job: WorkerJob, context: WorkerContext) -> World:
    """The world of the workers of a launch."""
    return World(context.rank, context.workers, context.rank, job.local_workers, rendezvous_store(context))


def connect_launched(job: WorkerJob, context: WorkerContext) -> Backend:
    """The device of a launched worker, connected to the other workers of the launch."""
    return connect(job, launched_world(job, context))


def run_launched(job: dict[str, Any], context: WorkerContext) -> RunResult | None:
    """The entry point of a launched worker that trains. `job`: `Job.as_json()`."""
    training = Job.from_json(job)
    return run(training, launched_world(training, context), context)


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


class Parent(Protocol):
    """Who has started a worker."""

    def tell_training(self) -> None:
        """Note that this worker begins to train, from where it can save its state if it is preempted."""

    def give_up(self, why: str) -> NoReturn:
        """End this process with a sentence, from any thread."""


def run(job: Job, world: World, parent: Parent) -> RunResult | None:
    """Train as one of the workers of this world; the result, on rank 0.

    Leaves `metrics.jsonl`, `ledger.json` and `model/` in the run's folder. Raises what `translate_worker_errors`
    raises, and Preempted when all workers have saved their state to end.
    """
    config, rank, timeout_s = job.config, world.rank, job.config.launch.timeout_s
    with translate_worker_errors(rank, "sharding=fsdp, precision=bf16 or a smaller model"):
        backend = connect(job, world)

        profiler = Profiler(config.profile, job.folder, backend) if config.profile.steps is not None else None
        identity = job_identity(job, rank)
        checkpoints = Checkpoints(
            job.folder, config.checkpoint, backend, identity, requests.preempted, job.pauses_after
        )
        files = (
            RunFiles(checkpoints, MetricsLog(job.folder), KeptRows(job.folder)) if rank == 0 else RunFiles(checkpoints)
        )
        hooks = Hooks(
            log=files.log.write if files.log is not None else None,
            evaluation_progress=PhaseProgress(job.folder, "evaluating", "batches") if rank == 0 else None,
            kept_rows=files.kept_rows,
            asked_to_end=checkpoints.preempted,
            after_step=(profiler, checkpoints) if profiler is not None else (checkpoints,),
        )
        loop = build_loop(job, backend, hooks)

        require_space_for_model(job, loop)  # found out at the end, it would be too late
        waits = CoreWaits()
        try:
            watchdog = Watchdog(loop, world.store, timeout_s, parent.give_up)
            with long_collectives(timeout_s), watchdog, profiler or contextlib.nullcontext():
                if config.checkpoint.on_preemption:
                    requests.training, requests.grace_s = True, config.launch.grace_s
                    parent.tell_training()
                if not job.pauses_after(loop.optimizer_step):  # it may have been killed after it had saved this step
                    with contextlib.suppress(Paused):
                        loop.train()
                loop.finish()
                loop.meter.timer.progress("checkpoint")
                checkpoints.wait()
        finally:
            write_ledger(job, loop)  # also when it ends the run

        result = finish(job, loop, files, waits.share())
        backend.close()
    return result
