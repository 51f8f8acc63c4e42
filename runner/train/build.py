"""Build one worker's replica with everything that trains it, and train it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner import __version__
from runner.backends import Backend, build_backend
from runner.backends.machine import CoreWaits, available_cores, describe_machine, library_versions, processor
from runner.config.choices import OptimizerName, ShardingKind
from runner.config.instantiate import build_recipe, recipe_code
from runner.config.plain import from_plain, to_plain
from runner.config.schema import Config
from runner.data.cache import Cache
from runner.data.dropout import draw_few_bits
from runner.data.embedding import keep_gradients
from runner.data.recipe import DataFacts, Prepared, Recipe
from runner.errors import RunFailed, UserError, first_line
from runner.exact import check_model, exact_streams, standard_streams
from runner.folder.evaluation_rows import MOST_ROWS, write_rows
from runner.folder.files import is_from_disk, require_space, write_json
from runner.folder.metrics_log import MetricsLog
from runner.folder.phase_progress import PhaseProgress
from runner.folder.record import RunResult
from runner.plan import Plan
from runner.plan.history import PROCESSOR
from runner.sync import Trained, build_sync_policy
from runner.sync.averaging import wire_dtype
from runner.sync.telemetry import sync_summary
from runner.train import ledger
from runner.train.adapter import (
    add_adapter,
    changing_state,
    frozen_digest,
    load_changing_state,
    without_adapter,
)
from runner.train.checkpoint import Checkpoints, Saved, State, load, read_manifest, restored, sync_digest
from runner.train.compilation import compile_model
from runner.train.flops import flops_per_sample, peak_flops_per_s
from runner.train.loop import LogMetrics, Loop
from runner.train.optim import build_optimizer
from runner.train.precision import Precision
from runner.train.profile import profiled
from runner.train.seeds import set_seed, worker_seed
from runner.train.sharding import in_turn, mesh_of, shard
from runner.train.tokens import Tokens, over_all_workers

#: Before the names of modules, in the identity of a checkpoint.
CODE_PREFIX = "code of "


@dataclass(frozen=True)
class WorkerJob:
    """What a worker of any command needs to know.

    `folder`: for the files that workers write. `local_workers`: on each machine. `threads`: for each worker's
    computations on a CPU.
    """

    config: Config
    facts: DataFacts
    folder: Path
    device_type: str
    local_workers: int
    threads: int

    def as_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain


@dataclass(frozen=True)
class Job(WorkerJob):
    """A training job, in the folder of its run.

    `started_at`: of the command, or of workers that were started again, in seconds since the epoch. `checkpoint`: the
    folder of the one to continue from. `experiment`: what checkpoints say about it, as JSON-like data.
    """

    plan: Plan
    started_at: float
    checkpoint: Path | None = None
    experiment: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Job:
        return from_plain(Job, data)


def connect(job: WorkerJob, rank: int, world_size: int, local_rank: int, store: dist.Store) -> Backend:
    """This worker's device, connected to the other workers through `store`."""
    torch.set_num_threads(job.threads)
    if job.config.equivalence.is_identical:
        _make_deterministic(job.device_type)
    return build_backend(
        job.device_type,
        rank,
        world_size,
        local_rank,
        store,
        local_workers=job.local_workers,
        cache=Cache(job.config.cache_dir).root,
        threads=job.threads,
        timeout_s=job.config.launch.timeout_s,
        offloads=job.config.sharding.kind is ShardingKind.fsdp_offload,
    )


def _make_deterministic(device_type: str) -> None:
    """Let torch refuse operations whose bits change from run to run, and choose others where it can."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # to find mistakes only
    if device_type != "cuda":
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS is first used
    torch.backends.cudnn.benchmark = False  # chooses kernels by their speed in this run
    # Their backward passes add in an order that is not fixed.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def build_loop(job: Job, backend: Backend, log: LogMetrics) -> Loop:
    """One worker's training loop: data, model, optimizer and sync policy. A collective.

    With `job.checkpoint` it continues from there. Raises UserError if data or model are not those that were saved.
    """
    config = job.config
    saved = read_manifest(job.checkpoint) if job.checkpoint is not None else None
    state = load(saved, backend.rank, backend.world_size, config.sync, config.sharding) if saved is not None else None
    recipe: Recipe = build_recipe(config.recipe, config.trusted_packages)
    prepared = prepare_data(recipe, job, backend)
    precision = Precision(config.precision.name, backend.device.type)
    set_seed(config.seed)  # the same on all workers, so that new parameters are the same
    if config.sharding.kind is ShardingKind.none:
        eager_device = torch.device("cpu") if backend.compiles else backend.device
        model, identity = _build_model(config, recipe, prepared, precision, eager_device, saved, state)
        model, sharded = to_device(model, backend.device), None
    else:
        mesh = mesh_of(backend)
        wire = wire_dtype(config.sync.compress) if backend.world_size > 1 else None
        with in_turn(backend):
            cpu = torch.device("cpu")
            model, identity = _build_model(config, recipe, prepared, precision, cpu, saved, None)
            sharded = shard(config.sharding, model, backend, mesh, wire)
    # torch's fused SGD does not take sharded tensors.
    fused = not backend.compiles and (sharded is None or config.optimizer.name is not OptimizerName.sgd)
    optimizer = build_optimizer(job.plan.scaled(config.optimizer), model, fused)
    bytes_per_pass = sharded.bytes_per_pass if sharded is not None else None
    trained = Trained(model, optimizer, bytes_per_pass, keep_gradients)
    policy = build_sync_policy(config, job.plan, trained, backend)
    if config.equivalence.is_identical:
        _require_equal_workers(model, backend, job.device_type)
    own_seed = worker_seed(config.seed, backend.rank, saved.step if saved is not None else 0)
    set_seed(own_seed)
    backend.seed(own_seed)
    by_sample = config.equivalence.dropout_by_sample
    dropout = exact_streams(config.seed) if by_sample else standard_streams
    if backend.device.type == "cpu" and not config.compile:
        if not by_sample:
            draw_few_bits(model)
        # Not with DDP or the sum of shards, which refer to gradients from one backward pass to the next, and not with
        # sharded weights, which are other tensors.
        if policy.forward_model is model and job.plan.shards is None and sharded is None:
            keep_gradients(model)
    loop = Loop(config, job.plan, recipe, prepared, model, optimizer, policy, backend, precision, dropout, log)
    loop.identity, loop.sharded = identity, sharded
    if state is not None:
        loop.load_state_dict(state)
    return loop


def _require_equal_workers(model: nn.Module, backend: Backend, device_type: str) -> None:
    """Raises UserError if processors or initial weights differ between workers. A collective."""
    rule = "bits differ between them: use machines of one kind, or equivalence=exact"
    for what, own, why in (
        ("processor", processor(device_type), rule),
        ("weights", weights_digest(model.state_dict()), "let build_model depend on the seed only"),
    ):
        found = backend.all_gather_object(own)
        if len(set(found)) > 1:
            differs = next(rank for rank, one in enumerate(found) if one != found[0])
            worker = f"worker {differs} has other {what} than worker 0 ({found[differs]}, {found[0]})"
            raise UserError(f"equivalence=identical is not possible: {worker}; {why}")


def _build_model(
    config: Config,
    recipe: Recipe,
    prepared: Prepared,
    precision: Precision,
    device: torch.device,
    saved: Saved | None,
    state: State | None,
) -> tuple[nn.Module, dict[str, str]]:
    """The model on `device`, with the weights of `state` if given, and what identifies it in a checkpoint."""
    model = add_adapter(config.adapter, recipe.build_model(prepared))
    frozen = frozen_digest(model)  # in fp32: a run can continue in another precision
    model = precision.cast(model).to(device)
    _apply_options(config, model)
    identity = _identity(prepared, model, frozen)
    if saved is not None:
        _require_same(saved, identity)
    if state is not None:
        weights = restored({**state["model"], **state["buffers"]}, changing_state(model))
        load_changing_state(model, weights)  # before the sync policy copies them
    if config.equivalence.dropout_by_sample:
        try:
            changed = check_model(recipe, prepared, model, device)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise _not_identical(first_line(error)) from error
        if changed and config.equivalence.is_identical:
            raise _not_identical(f"a forward pass changes {changed[0]}, of which each worker would have its own")
    return model, identity


def _not_identical(reason: str) -> UserError:
    return UserError(f"equivalence=identical is not possible for this model: {reason}; use equivalence=exact")


def _identity(prepared: Prepared, model: nn.Module, frozen: str | None) -> dict[str, str]:
    """What must be the same when a run is resumed, as only a worker knows it: tokens, layers and frozen weights."""
    layers = hashlib.sha256(repr(model).encode()).hexdigest()
    return {"tokenised data": prepared.folder.name, "model": layers, **({"frozen weights": frozen} if frozen else {})}


def code_of(config: Config) -> dict[str, str]:
    """Digests of the code that a checkpoint was made with: the runner's, and each module's that defines the recipe."""
    root = Path(__file__).parents[1]
    own = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))).hexdigest()
    modules = recipe_code(config.recipe, config.trusted_packages)
    return {
        "runner": f"{__version__} ({own[:8]})",
        **{f"{CODE_PREFIX}{name}": digest for name, digest in modules.items()},
    }


def _require_same(saved: Saved, identity: Mapping[str, str]) -> None:
    for name, value in identity.items():
        if saved.identity.get(name, value) != value:
            raise UserError(
                f"resume={saved.folder.parents[1]} is invalid: the {name} of the run's recipe changed after step "
                f"{saved.step}; restore it, or start a new run"
            )


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on `device`, with tied parameters still tied: moving to or from XLA gives each name a new parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model = model.to(device)
    for first, *others in names.values():
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)
    return model


def train(
    job: Job,
    backend: Backend,
    watched: Callable[[Loop], AbstractContextManager[object]],
    preempted: Callable[[], bool],
) -> RunResult | None:
    """Train to the end, and leave `metrics.jsonl`, `ledger.json` and `model/` in the run's folder; rank 0's result.

    `watched`: the context in which the loop trains. `preempted`: whether this worker was asked to save and end. Raises
    Preempted when all workers have.
    """
    log = MetricsLog(job.folder) if backend.rank == 0 else None
    not_kept: list[str] = []
    loop = build_loop(job, backend, log.write if log is not None else _no_log)
    if log is not None:
        loop.eval_progress = PhaseProgress(job.folder, "evaluating", "batches")
        if len(loop.prepared.eval) <= MOST_ROWS:
            loop.keep_rows = functools.partial(_keep_rows, job.folder, not_kept)
    identity: dict[str, Any] = {
        **loop.identity,
        "data": job.facts.digest,
        "sync": sync_digest(job.config.sync, job.config.sharding),
        **library_versions(job.device_type),
        **({PROCESSOR: processor(job.device_type)} if job.config.equivalence.is_identical else {}),
    }
    if backend.rank == 0:  # which writes it down
        identity |= {**code_of(job.config), "experiment": job.experiment}
    note_waiting = functools.partial(loop.meter.progress, "checkpoint")  # as the watchdog then calls it
    checkpoints = loop.checkpoints = Checkpoints(
        job.folder, job.config.checkpoint, backend, identity, preempted, note_waiting
    )
    saved_part = loop.model.state_dict() if job.config.adapter.merge else changing_state(loop.model)
    model_bytes = sum(tensor.nbytes for tensor in saved_part.values())
    if log is not None:  # found out at the end, it would be too late
        require_space(job.folder, model_bytes, "the model")
    waits = CoreWaits()
    try:
        with watched(loop), profiled(job.config.profile, loop, job.folder):
            loop.train()
            loop.finish()
            checkpoints.wait()
    finally:
        # Also when the ledger ends the run. Before its first epoch is closed it has nothing to report.
        if backend.rank == 0 and (loop.ledger.epochs or loop.ledger.failures):
            write_json(job.folder / "ledger.json", ledger.as_json(loop.ledger, job.facts.unit, job.facts.groups))
    waited_share = waits.share()
    utilisation, uncounted = measure_utilisation(loop, job.local_workers * job.threads)
    loop.policy.close()
    warnings = (*_gather_warnings(loop, log.warning() if log is not None else None), *not_kept[-1:], *uncounted)
    tokens = over_all_workers(loop.tokens, backend)
    digest = _common_digest(loop) if job.plan.shards is not None else None
    if loop.best.weights is not None:  # on worker 0, which saves them
        load_changing_state(loop.model, loop.best.weights)
        digest = digest and weights_digest(changing_state(loop.model))
    whole = loop.sharded.whole() if loop.sharded is not None else None
    result = None
    if log is not None:
        log.close()
        result = _result(loop, job, tokens, utilisation, warnings)
        result = dataclasses.replace(result, weights_digest=digest, waited_share=waited_share)
        require_space(job.folder, model_bytes, "the model")
        _save(loop, whole or to_device(loop.model, torch.device("cpu")), job.folder)
    backend.wait_for_all(None)  # a large model takes longer to save than a collective may last
    return result


def _common_digest(loop: Loop) -> str:
    """The digest of the weights after the last step, which all workers must have. A collective."""
    digests = loop.backend.all_gather_object(weights_digest(changing_state(loop.model)))
    if len(set(digests)) > 1:
        raise RunFailed(f"equivalence=identical: workers ended with different weights ({', '.join(digests)})")
    return str(digests[0])


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names and bits of these tensors; 16 digits of it."""
    content = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        content.update(name.encode())
        content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()[:16]


def _save(loop: Loop, model: nn.Module, folder: Path) -> None:
    """Write the folder `model`, all of it or nothing. Raises RunFailed if the disk does not take it."""
    draft = folder / ".model"
    model = without_adapter(loop.config.adapter, model)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        loop.recipe.save(model, loop.prepared, draft)
        shutil.rmtree(folder / "model", ignore_errors=True)  # of a run that ended while it was saved
        draft.rename(folder / "model")
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        if not is_from_disk(error, folder):
            raise
        raise RunFailed(f"the model cannot be written to {folder} ({first_line(error)})") from error


def _gather_warnings(loop: Loop, own: str | None) -> tuple[str, ...]:
    """All workers' warnings about compilation and checkpoints, and this worker's `own`. A collective."""
    not_saved = loop.checkpoints.warning() if loop.checkpoints is not None else None
    texts = loop.backend.all_gather_object((loop.compilations.warning(), not_saved, own))
    return tuple(f"worker {rank}: {text}" for rank, own in enumerate(texts) for text in own if text)


def _keep_rows(folder: Path, warnings: list[str], metrics: Mapping[str, Tensor]) -> None:
    """Write the metrics by row; training does not end for lack of them, so that a full disk is a warning."""
    try:
        if metrics:
            write_rows(folder, {name: values.numpy() for name, values in metrics.items()})
    except RunFailed as error:
        warnings.append(str(error))


def _no_log(step: int, metrics: dict[str, float]) -> None:
    """Only rank 0 logs."""


def prepare_data(recipe: Recipe, job: WorkerJob, backend: Backend) -> Prepared:
    """The tokenised data. One worker of each machine tokenises; the others map the same cache entry. A collective."""
    progress = PhaseProgress(job.folder, "tokenising", "texts") if backend.rank == 0 else None
    cache = Cache(job.config.cache_dir, progress)
    first = backend.local_rank == 0 or backend.world_size == 1
    entry = recipe.prepare(cache, job.facts) if first else None
    # Wait for all machines. The entry's name, not its path: another machine may keep its cache elsewhere.
    names = backend.wait_for_all(entry.name if entry is not None else None)
    return dataclasses.replace(Prepared.load(cache.root / names[0]), compiles=backend.compiles)


def _apply_options(config: Config, model: nn.Module) -> None:
    if config.gradient_checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None or not getattr(model, "supports_gradient_checkpointing", False):
            raise UserError(
                f"gradient_checkpointing=true is not supported by {type(model).__name__}: "
                "use gradient_checkpointing=false"
            )
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.compile:
        compile_model(model)


def measure_utilisation(loop: Loop, threads: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """How much of the devices was used, as entries of `RunResult`, and warnings. A collective.

    `threads`: of all workers of a machine together.
    """
    backend = loop.backend
    memory = backend.all_gather_object(backend.peak_memory_bytes())  # before it is used to find out the rest
    known: dict[str, Any] = {"peak_memory_bytes": None if None in memory else tuple(memory)}
    # Without throughput there is nothing to compare; on torch_xla counting would compile programs for new shapes.
    if backend.compiles or not loop.meter.timed_seconds:
        return known, ()
    warnings: tuple[str, ...] = ()
    if backend.rank == 0 or loop.policy.collective_forward:
        seen = loop.order.epoch_permutation(0)[: loop.plan.samples_before(loop.optimizer_step)]
        count = functools.partial(flops_per_sample, loop.recipe, loop.prepared, loop.model, backend, loop.precision)
        try:
            known["flops_per_sample"] = count(seen)
        except Exception as error:  # noqa: BLE001 - a figure must not cost the trained model, which is not saved yet
            warnings = (f"operations cannot be counted ({first_line(error)}): the utilization is not known",)
    peaks = backend.all_gather_object(peak_flops_per_s(backend, loop.precision, threads))
    known["peak_flops_per_s"] = None if None in peaks else sum(peaks)
    return known, warnings


def _result(
    loop: Loop, job: Job, tokens: Tokens | None, utilisation: Mapping[str, Any], warnings: tuple[str, ...]
) -> RunResult:
    meter, stats, best = loop.meter, loop.policy.stats(), loop.best
    return RunResult(
        optimizer_steps=loop.optimizer_step,
        applied_steps=loop.finite.applied_steps,
        skipped_steps=loop.finite.skipped_steps,
        samples_seen=sum(record.samples_seen for record in loop.ledger.epochs),
        samples_per_s=meter.timed_samples / meter.timed_seconds if meter.timed_seconds else None,
        first_step_s=(loop.first_step_at or time.time()) - job.started_at,
        first_step_compile_s=loop.first_step_compile_s,
        synchronisations=stats.synchronisations,
        comm_bytes=stats.bytes,
        comm_s=stats.seconds,
        comm_stall_s=stats.stall_seconds,
        checkpoint_stall_s=loop.checkpoints.stall_seconds if loop.checkpoints is not None else None,
        sync=sync_summary(loop.synchronisations, loop.policy.resolved_settings),
        step_s=meter.mean_step_seconds,
        evaluation_s=meter.paused_seconds,
        tokens=tokens,
        **utilisation,
        compilations=loop.compilations.total(),
        train_loss=meter.loss_total / max(meter.count_total, 1),
        noise=loop.noise.result(),
        eval=loop.final_metrics,
        best={"step": best.step, job.config.evaluation.metric: best.value},
        batch_statistics=any(isinstance(module, _BatchNorm) for module in loop.model.modules()),
        parameters=sum(parameter.numel() for parameter in loop.model.parameters()),
        trained_parameters=sum(parameter.numel() for parameter in loop.model.parameters() if parameter.requires_grad),
        truncated=loop.prepared.properties.get("truncated"),
        stopped_early=loop.optimizer_step < job.plan.optimizer_steps,
        machine=describe_machine(job.device_type, available_cores()),
        smaller_micro_batches=tuple(loop.smaller_micro_batches),
        warnings=warnings,
    )
