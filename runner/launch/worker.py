"""One worker: builds its replica, trains it, and on rank 0 leaves the results."""

from __future__ import annotations

import contextlib
import dataclasses
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

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from runner.backends import Backend, build_backend
from runner.backends.machine import describe_machine
from runner.config.choices import EquivalenceMode
from runner.config.instantiate import build_recipe
from runner.config.plain import from_plain, to_plain
from runner.config.schema import Config
from runner.data.cache import Cache
from runner.data.recipe import DataFacts, Prepared, Recipe
from runner.errors import UserError
from runner.exact import check_model, exact_streams, standard_streams
from runner.folder.eval_progress import EvalProgress
from runner.folder.files import write_json
from runner.folder.metrics_log import MetricsLog
from runner.plan import Plan
from runner.plan.placement import available_cores
from runner.sync import build_sync_policy
from runner.sync.telemetry import sync_summary
from runner.train import ledger
from runner.train.loop import Log, Loop
from runner.train.moving import moved
from runner.train.optim import build_optimizer
from runner.train.precision import Precision
from runner.train.seeds import set_seed, worker_seed
from runner.train.tokens import Tokens, over_all_workers


@dataclass(frozen=True)
class Job:
    """All that a worker is told.

    `local_workers`: on each machine. `started_at`: when the command started, in seconds since the epoch.
    """

    config: Config
    plan: Plan
    facts: DataFacts
    folder: Path
    device_type: str
    local_workers: int
    threads: int
    started_at: float

    def as_json(self) -> dict[str, Any]:
        return {name: to_plain(value) for name, value in vars(self).items()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Job:
        return Job(
            config=from_plain(Config, data["config"]),
            plan=from_plain(Plan, data["plan"]),
            facts=from_plain(DataFacts, data["facts"]),
            folder=Path(data["folder"]),
            device_type=data["device_type"],
            local_workers=data["local_workers"],
            threads=data["threads"],
            started_at=data["started_at"],
        )


#: A worker that fails leaves `<prefix><rank>.json` where the workers meet.
ERROR_PREFIX = "error-"


@dataclass(frozen=True)
class Place:
    """A launched worker's place among all workers of the launch, and the store through which they find each other."""

    rank: int
    world_size: int
    local_rank: int
    store: dist.Store


@contextlib.contextmanager
def launched(meeting: str) -> Iterator[Place]:
    """Be a worker under the elastic launcher, which says rank and world size in the environment.

    `meeting`: a folder of this launch, through which the workers find each other and leave what went wrong.
    """
    signal.signal(signal.SIGINT, leave_quietly)
    threading.Thread(target=_leave_with_the_command, daemon=True).start()
    # Workers of one machine talk over its loopback interface, and are not to be reached from anywhere else.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(Path(meeting) / "workers"), world_size)
    try:
        yield Place(rank, world_size, int(os.environ["LOCAL_RANK"]), store)
    except Exception as error:
        said = {
            "rank": rank,
            "time_ns": time.time_ns(),
            "user_error": isinstance(error, UserError),
            "message": str(error),
            "trace": traceback.format_exc(),
        }
        write_json(Path(meeting) / f"{ERROR_PREFIX}{rank}.json", said)
        raise


def run_launched(job: dict[str, Any], meeting: str) -> dict[str, Any] | None:
    """The entry point of a launched worker that trains."""
    with launched(meeting) as place:
        return run(Job.from_json(job), place.rank, place.world_size, place.local_rank, place.store)


def _leave_with_the_command() -> None:
    """End with the process that launched this one: killed outright it cannot tell its workers, nor can others."""
    command = multiprocessing.parent_process()
    if command is not None:
        command.join()
        os._exit(128 + signal.SIGKILL)


def leave_quietly(signum: int, frame: FrameType | None) -> None:
    # Ctrl-C reaches the whole foreground group. The parent answers it; a worker has nothing to say.
    os._exit(128 + signum)


def run(job: Job, rank: int, world_size: int, local_rank: int, store: dist.Store) -> dict[str, Any] | None:
    """Train as one worker of a world that meets at `store`. Rank 0 returns what the summary needs of the training."""
    backend = connect(job, rank, world_size, local_rank, store)
    result = _train(job, backend)
    backend.close()
    return result


def connect(job: Job, rank: int, world_size: int, local_rank: int, store: dist.Store) -> Backend:
    """This worker's device, and its place in the world that meets at `store`."""
    torch.set_num_threads(job.threads)
    return build_backend(
        job.device_type,
        rank,
        world_size,
        local_rank,
        store,
        local_workers=job.local_workers,
        cache=Cache(job.config.cache_dir).root,
        threads=job.threads,
    )


def build_loop(job: Job, backend: Backend, log: Log) -> Loop:
    """One worker's replica with everything that trains it. A collective."""
    config = job.config
    recipe = build_recipe(config.recipe, config.trusted_packages)
    prepared = _prepare_data(recipe, job, backend)
    set_seed(config.seed)  # equal on all workers, so that new parameters are
    precision = Precision(config.precision.name, backend.device.type)
    eager_device = torch.device("cpu") if backend.compiles else backend.device
    model = precision.cast(recipe.build_model(prepared)).to(eager_device)
    _apply_options(config, model)
    exact = config.equivalence.mode is EquivalenceMode.exact
    if exact:
        check_model(recipe, prepared, model, eager_device)
    model = moved(model, backend.device)
    optimizer = build_optimizer(config.optimizer, model, job.plan.lr, fused=not backend.compiles)
    policy = build_sync_policy(config, job.plan, model, optimizer, backend)
    own_seed = worker_seed(config.seed, backend.rank)
    set_seed(own_seed)
    backend.seed(own_seed)
    dropout = exact_streams(config.seed) if exact else standard_streams
    return Loop(config, job.plan, recipe, prepared, model, optimizer, policy, backend, precision, dropout, log)


def _train(job: Job, backend: Backend) -> dict[str, Any] | None:
    log = MetricsLog(job.folder) if backend.rank == 0 else None
    loop = build_loop(job, backend, log.write if log is not None else _no_log)
    if log is not None:
        loop.eval_progress = EvalProgress(job.folder)
    try:
        loop.train()
        loop.finish()
    finally:
        # Also, and above all, when it is the ledger that ends the run; of less than an epoch it knows nothing else.
        if backend.rank == 0 and (loop.ledger.epochs or loop.ledger.failures):
            books = ledger.as_json(loop.ledger, job.facts.unit, job.facts.groups)
            write_json(job.folder / "ledger.json", books)
    loop.policy.close()
    warnings = _warnings(loop)
    tokens = over_all_workers(loop.tokens, backend)
    if log is None:
        return None
    log.close()
    if loop.best.weights is not None:
        loop.model.load_state_dict(loop.best.weights)
    results = {**_results(loop, job, tokens), "warnings": warnings}
    loop.recipe.save(moved(loop.model, torch.device("cpu")), loop.prepared, job.folder / "model")
    return results


def _warnings(loop: Loop) -> list[str]:
    """What any worker has to say about its compilations. A collective."""
    texts = loop.backend.all_gather_object(loop.compilations.warning())
    return [f"worker {rank}: {text}" for rank, text in enumerate(texts) if text]


def _no_log(step: int, metrics: dict[str, float]) -> None:
    """Only rank 0 logs."""


def _prepare_data(recipe: Recipe, job: Job, backend: Backend) -> Prepared:
    # One worker of each machine tokenises; the others wait, find the entry, and map it.
    cache = Cache(job.config.cache_dir)
    entry = recipe.prepare(cache, job.facts) if backend.local_rank == 0 else None
    # Wait for all machines. The entry's name, not its path: another machine may keep its cache elsewhere.
    names = backend.all_gather_object(entry.name if entry is not None else None)
    return Prepared.load(cache.root / names[0])


def _apply_options(config: Config, model: torch.nn.Module) -> None:
    if config.gradient_checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None or not getattr(model, "supports_gradient_checkpointing", False):
            raise UserError(
                f"gradient_checkpointing=true is not supported by {type(model).__name__}: "
                "leave gradient_checkpointing=false"
            )
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.compile:
        model.compile(dynamic=True)  # padding makes shapes vary: one program for all of them


def _results(loop: Loop, job: Job, tokens: Tokens | None) -> dict[str, Any]:
    meter, stats, kept = loop.meter, loop.policy.stats(), loop.best
    best = {"step": kept.step, job.config.evaluation.metric: kept.value}
    compiled = loop.compilations.total()
    return {
        "optimizer_steps": loop.optimizer_step,
        "samples_seen": sum(record.samples_seen for record in loop.ledger.epochs),
        "samples_per_s": meter.timed_samples / meter.timed_seconds if meter.timed_seconds else None,
        "first_step_s": (loop.first_step_at or time.time()) - job.started_at,
        "synchronisations": stats.synchronisations,
        "comm_bytes": stats.bytes,
        "comm_s": stats.seconds,
        "comm_stall_s": stats.stall_seconds,
        "sync": sync_summary(loop.synchronisations),
        "step_s": meter.mean_step_seconds,
        "evaluation_s": meter.paused_seconds,
        "tokens": dataclasses.asdict(tokens) if tokens is not None else None,
        "compilations": dataclasses.asdict(compiled) if compiled is not None else None,
        "train_loss": meter.loss_total / max(meter.count_total, 1),
        "eval": kept.metrics if kept.weights is not None else loop.eval_metrics,
        "best": best,
        "batch_statistics": any(isinstance(module, _BatchNorm) for module in loop.model.modules()),
        "stopped_early": loop.optimizer_step < job.plan.optimizer_steps,
        "machine": describe_machine(job.device_type, available_cores()),
    }
