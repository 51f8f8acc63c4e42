"""Build one worker's replica of a run, with everything that trains it."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import nn

from runner.backends import Backend
from runner.backends.moving import to_device
from runner.config.choices import OptimizerName, ShardingKind
from runner.config.instantiate import build_recipe
from runner.config.schema import Config
from runner.data.cache import Cache
from runner.data.recipe import Prepared, Recipe
from runner.errors import UserError, first_line
from runner.exact import check_model, exact_streams, standard_streams
from runner.folder.phase_progress import PhaseProgress
from runner.kernels.dropout import draw_few_bits
from runner.kernels.embedding import keep_gradients
from runner.plan.order import DataOrder
from runner.sync import build_sync_policy
from runner.sync.averaging import wire_dtype
from runner.train.adapter import add_adapter, changing_state, frozen_digest, load_changing_state
from runner.train.checkpoint import Saved, State, load, read_manifest, restored
from runner.train.compilation import compile_model
from runner.train.hooks import Hooks
from runner.train.identical import require_equal_workers
from runner.train.identity import model_identity, require_same_model
from runner.train.job import Job, WorkerJob
from runner.train.loop import Loop
from runner.train.optim import build_optimizer
from runner.train.precision import Precision
from runner.train.replica import Replica
from runner.train.seeds import set_seed, worker_seed
from runner.train.sharding import in_turn, mesh_of, shard


def build_loop(job: Job, backend: Backend, hooks: Hooks | None = None, order: DataOrder | None = None) -> Loop:
    """One worker's training loop. A collective.

    `order`: of the data, if not the plan's. With `job.checkpoint` the loop continues from there. Raises UserError if
    data or model are not those that were saved.
    """
    config, saved, state = job.config, None, None
    if job.checkpoint is not None:
        saved = read_manifest(job.checkpoint)
        state = load(saved, backend.rank, backend.world_size, config.sync, config.sharding)
    replica = _build_replica(job, backend, saved, state)
    if order is None:
        lengths = np.asarray(replica.prepared.train.column("length")) if config.batch.length_sorted else None
        order = DataOrder(job.plan, config.seed, backend.rank, lengths)
    loop = Loop(replica, hooks or Hooks(), order)
    if state is not None:
        loop.load_state_dict(state)
    return loop


def _build_replica(job: Job, backend: Backend, saved: Saved | None, state: State | None) -> Replica:
    """The replica at the start of training, or with the weights of `state`, the content of `saved`."""
    config = job.config
    recipe: Recipe = build_recipe(config.recipe, config.trusted_packages)
    prepared = prepare_data(recipe, job, backend)
    precision = Precision(config.precision.name, backend.device.type)
    set_seed(config.seed)  # the same on all workers, so that new parameters are the same
    if config.sharding.kind is ShardingKind.none:
        eager_device = torch.device("cpu") if backend.compiles else backend.device
        model, identity = _build_model(config, recipe, prepared, precision, eager_device, saved)
        if state is not None:  # before the sync policy copies the weights
            weights = restored({**state["model"], **state["buffers"]}, changing_state(model))
            load_changing_state(model, weights)
        model, sharded = to_device(model, backend.device), None
    else:
        mesh = mesh_of(backend)
        wire = wire_dtype(config.sync.compress) if backend.world_size > 1 else None
        with in_turn(backend):
            model, identity = _build_model(config, recipe, prepared, precision, torch.device("cpu"), saved)
            sharded = shard(config.sharding, model, backend, mesh, wire)
    # torch's fused SGD does not take sharded tensors.
    fused = not backend.compiles and (sharded is None or config.optimizer.name is not OptimizerName.sgd)
    optimizer = build_optimizer(job.plan.scaled(config.optimizer), model, fused)
    bytes_per_pass = sharded.bytes_per_pass if sharded is not None else None
    policy = build_sync_policy(config, job.plan, model, backend, bytes_per_pass, keep_gradients)
    if config.equivalence.is_identical:
        require_equal_workers(model, backend, job.device_type)
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
    return Replica(
        config, job.plan, recipe, prepared, model, optimizer, policy, backend, precision, dropout, sharded, identity
    )


def _build_model(
    config: Config,
    recipe: Recipe,
    prepared: Prepared,
    precision: Precision,
    device: torch.device,
    saved: Saved | None,
) -> tuple[nn.Module, dict[str, str]]:
    """The model on `device`, as a new run has it, and what identifies it in a checkpoint: if `saved`, in this one."""
    model = add_adapter(config.adapter, recipe.build_model(prepared))
    frozen = frozen_digest(model)  # in fp32: a run can continue in another precision
    model = precision.cast(model).to(device)
    _apply_options(config, model)
    identity = model_identity(prepared, model, frozen)
    if saved is not None:
        require_same_model(saved, identity)
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


def prepare_data(recipe: Recipe, job: WorkerJob, backend: Backend) -> Prepared:
    """The tables. One worker of each machine makes them; the others map the same cache entry. A collective."""
    progress = PhaseProgress(job.folder, "preparing the data", "samples") if backend.rank == 0 else None
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
